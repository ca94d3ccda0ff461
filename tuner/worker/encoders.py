"""The encoder of a recipe's model: its tokenizer, or its processor if the model reads images."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

from tuner.data import limits
from tuner.data.image_encoder import ImageEncoder
from tuner.data.text_encoder import TextEncoder
from tuner.models.load import processor_of, tokenizer_of
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.tools import tools_of
from tuner.rewards.tool_calls import described


def encoder_of(config: RecipeConfig, path: str, day: date | None = None) -> TextEncoder:
    """Load the tokenizer or the processor to train with.

    Args:
        path: The result of `models.load.pretrained_path` for the model.
        day: What a chat template takes for today. None: today.

    Raises:
        ModelError: the model has no tokenizer or processor, or it needs remote code.
        MachineError: the hub cannot be reached.
        ToolError: a tool of the objective cannot be described; its code runs in a process of its own.
    """
    if not config.reads_images:
        return with_tools(TextEncoder(tokenizer_of(config, path), day=day), config)
    return ImageEncoder.of(processor_of(config, path), config.train_dataloader.dataset, day)


def with_tools(encoder: TextEncoder, config: RecipeConfig) -> TextEncoder:
    """Return an encoder that renders prompts with the tools of the objective, if it has some.

    Each rank describes them itself, though a check before the start has done it. What the model is told must be what
    this rank calls: the file as it is now, on this node. The check may be of an earlier attempt or of another node.

    Raises:
        ModelError: calls cannot be read from the chat template.
        ToolError: a tool cannot be described; its code runs in a process of its own.
    """
    tools = tools_of(config.objective)
    if tools is None:
        return encoder
    from tuner.rewards.tool_templates import plain, refuse_changing, refuse_unknown  # TRL, and few runs have tools

    tokenizer = encoder.tokenizer
    refuse_unknown(tokenizer.chat_template, getattr(tokenizer, "response_template", None))
    slow = TimeoutError("the chat template takes too long")
    with plain(tokenizer), limits.memory(), limits.processor_time(slow):
        refuse_changing(tokenizer)
    return replace(encoder, tools=described(tools).schemas)
