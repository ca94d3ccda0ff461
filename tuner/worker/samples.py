"""Answers to validation prompts before and after training, beside the reference answers.

It loads the saved result as a user would, which also shows that the result loads. No error here can end a run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import textwrap
import time
from dataclasses import replace
from typing import TextIO

import psutil
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tuner.data import images
from tuner.data.pipeline import Pipeline
from tuner.data.sample import (
    IGNORED,
    Chat,
    Feedback,
    Message,
    Pair,
    Prompt,
    Sample,
    images_of,
    spoken,
    text_of,
    unmarked,
)
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError, Key, Option, Text, visible
from tuner.files import write_text
from tuner.models import adapters
from tuner.models.arguments import load_options, written
from tuner.models.load import auto_class, pretrained_path
from tuner.recipes.schema import Dataset, RecipeConfig
from tuner.runs.directory import RunDirectory
from tuner.worker.generation import Settings, ask_for_one_answer, generate
from tuner.worker.guard import Guard
from tuner.worker.process import warn

_MAX_ANSWER_TOKENS = 64
_MAX_SHOWN = 160
_MAX_PICTURES = 8
"""Of a sample in samples.jsonl."""
_WIDTH = 120
_BYTES_PER_PARAMETER = 4
"""The room that a second copy of the model needs: weights in 16 bits, or in 32, and what generation adds."""
_DEFAULT = 5
"""The number of prompts if the recipe leaves it open."""
_PART, _LEAST_S, _MOST_S = 0.1, 2.0, 60.0
"""If the recipe leaves the number open, answers may take this part of the run's seconds, within these limits: in less
time no prompt is answered, and more time keeps the GPUs of a large model waiting."""


class _OutOfTime(Exception):
    """Ends the answers."""


def show_samples(
    config: RecipeConfig,
    encoder: TextEncoder,
    run_dir: RunDirectory,
    guard: Guard,
    *,
    run_s: float,
    num_parameters: int,
) -> None:
    """Print `log.num_samples` validation prompts with the reference and the model's answers; write samples.jsonl.

    'auto' shows up to five prompts, those that are answered within a tenth of the run. Training is done, so an error is
    only a warning, and a request to stop leaves out the remaining answers. Rank 0 loads the model once more.
    """
    count, seconds = config.log.num_samples, float("inf")
    if count == "auto":
        count, seconds = _DEFAULT, min(_PART * run_s, _MOST_S)
        if seconds < _LEAST_S or config.val_dataloader is None or config.objective.facts.scores:
            return
    if not count:
        return
    if config.val_dataloader is None:
        add = f"{Option('val_split', 0.05)} or {Option('val', 'FILE')}"
        print(Text(f"No samples: there are no validation rows. Add {add}."), flush=True)
        return
    if config.objective.facts.scores:
        print("log.num_samples is ignored: a reward model gives no answers.", flush=True)
        return
    device = _device(config, num_parameters, asks_host=config.log.num_samples == "auto")
    if device is None:
        if config.log.num_samples != "auto":
            print("No samples: neither the GPU nor the CPU can hold and run a second copy of the model.", flush=True)
        return
    try:
        conversations = prompts(config.val_dataloader.dataset, count, config.objective.type)
        _show(config, encoder, conversations, run_dir, guard, seconds, device)
    except Exception as error:
        warn(run_dir, f"no samples: {_message(error)}")


def _device(config: RecipeConfig, num_parameters: int, *, asks_host: bool) -> torch.device | None:
    """Return where a second copy of the model runs: this rank's GPU if it has room, else the CPU; None if neither can.

    If it `asks_host`, the CPU counts only if the host's memory has room.
    """
    needed = _BYTES_PER_PARAMETER * num_parameters
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        if needed < torch.cuda.mem_get_info()[0]:
            return torch.device("cuda", torch.cuda.current_device())
        # Liger replaced classes of transformers in this process, so a new model has its kernels, too: GPUs run them.
        if config.model.use_liger_kernel is True:
            return None
    has_room = needed < psutil.virtual_memory().available
    return torch.device("cpu") if has_room or not asks_host else None


def _show(
    config: RecipeConfig,
    encoder: TextEncoder,
    conversations: list[Chat],
    run_dir: RunDirectory,
    guard: Guard,
    seconds: float,
    device: torch.device,
) -> None:
    if not conversations:  # plain text has no prompts
        return
    began = time.monotonic()
    # With ZeRO-3 on, from_pretrained would shard the weights over all ranks; here one rank loads them, as a user would.
    unset_hf_deepspeed_config()
    questions = [before_answer(chat) for chat in conversations]
    result = load_options(written(config.model, run_dir.final))
    if not config.reads_images:
        encoder = TextEncoder(AutoTokenizer.from_pretrained(run_dir.final, **result), day=run_dir.day)
    auto = auto_class(reads_images=config.reads_images)
    model = auto.from_pretrained(run_dir.final, device_map={"": device}, **result)  # and an adapter's base
    answers = _answers(model, encoder, questions, guard, began + seconds / 2)
    if not answers:
        if not guard.stop_requested:
            advice = f"{Key('num_samples', len(conversations))} takes the time that it needs"
            print(Text(f"No samples: there was no answer within {seconds / 2:.0f} s; {advice}."), flush=True)
        return
    if not config.adapter:
        model = None  # two models at once may not fit into the host's memory
    before = _before(config, model, encoder, questions[: len(answers)], guard, began + seconds, device)
    table = Table(title="Validation prompts", title_justify="left")
    # There is no column of empty cells for a model that had no time left, or could not answer.
    for title in ("prompt", "reference", *(["before training"] if before else []), "after training", ""):
        table.add_column(title)
    lines, num_right = [], 0
    for chat, answer, first in itertools.zip_longest(conversations[: len(answers)], answers, before):
        prompt, right = shown(chat.messages[:-1]), right_answer(encoder, chat)
        is_right = same_text(answer, right)
        num_right += is_right
        answers_shown = (first or "", answer) if before else (answer,)
        cells = (
            visible(text)
            for text in (prompt, right, *(textwrap.shorten(text_shown, _MAX_SHOWN) for text_shown in answers_shown))
        )
        table.add_row(*map(escape, cells), "✓" if is_right else "✗")
        line = {"prompt": prompt, "right": right, "before": first, "answer": answer, "is_right": is_right}
        if pictures := images_of(chat.messages)[:_MAX_PICTURES]:
            line["images"] = [images.thumbnail(picture) for picture in pictures]
        lines.append(json.dumps(line))
    write_text(run_dir.samples, "\n".join(lines) + "\n")
    Console(width=_width(guard.terminal)).print(table)
    print(f"{num_right} of {len(answers)} right to the letter.", flush=True)


def _width(terminal: TextIO | None) -> int:
    with contextlib.suppress(OSError):
        if terminal:
            return os.get_terminal_size(terminal.fileno()).columns or _WIDTH
    return _WIDTH


def prompts(dataset: Dataset, count: int, objective: str) -> list[Chat]:
    """Return conversations that end with a reference answer, with their tools, spread evenly over the split."""
    pipeline = Pipeline(dataset, objective, decodes_images=False)
    tally = pipeline.tally()
    samples = itertools.islice(pipeline.samples(tally, tally.refuse), 100_000)
    chats = [chat for _, sample in samples if (chat := _right(sample))]
    count = min(count, len(chats))
    return [chats[i * len(chats) // count] for i in range(count)]


def before_answer(chat: Chat) -> Chat:
    return replace(chat, messages=chat.messages[:-1])


def right_answer(encoder: TextEncoder, chat: Chat) -> str:
    """Return the reference answer, the last turn, as text; calls of tools as the chat template writes them."""
    *before, answer = chat.messages
    if not answer.get("tool_calls") and answer["content"]:
        return text_of(answer["content"])
    untrained = [{**unmarked(turn), "weight": 0} if turn["role"] == "assistant" else turn for turn in before]
    try:
        [parts] = encoder.encode([("the reference", replace(chat, messages=[*untrained, unmarked(answer)]))])
    except DataError:  # the preparation of the data has reported the row
        return spoken(answer)
    ids, labels = parts[-1].labelled
    return encoder.decode(ids[labels != IGNORED].tolist(), skips_special=True).strip()


def _right(sample: Sample) -> Chat | None:
    """Return a sample as a conversation that ends with a reference answer; None if it has no such answer."""
    match sample:
        case Chat():
            return sample
        case Pair(prompt=prompt, chosen=answer) | Feedback(prompt=prompt, completion=answer, label=True):
            return Chat([*prompt, *answer], sample.tools, sample.chat_template_kwargs)
        case Prompt(prompt=prompt, text=None, columns={"answer": str(answer)}):
            messages = [*prompt, {"role": "assistant", "content": answer}]
            return Chat(messages, sample.tools, sample.chat_template_kwargs)
    return None


def _before(
    config: RecipeConfig,
    model: PreTrainedModel | None,
    encoder: TextEncoder,
    prompts: list[Chat],
    guard: Guard,
    deadline: float,
    device: torch.device,
) -> list[str]:
    """Return the answers of the model before training to the first prompts; [] if it cannot answer.

    That is `model` without its adapter, or, without a `model`, the one that the recipe names.
    """
    try:
        if model is None:
            where, auto = pretrained_path(config.model), auto_class(reads_images=config.reads_images)
            model = auto.from_pretrained(where, device_map={"": device}, **load_options(config.model))
        else:
            adapters.switch_off(model)
        return _answers(model, encoder, prompts, guard, deadline)
    except Exception as error:  # a base model may not know the tokens of the chat template
        warn(guard.run_dir, f"no answers from before training: {_message(error)}")
        return []


def _answers(
    model: PreTrainedModel, encoder: TextEncoder, prompts: list[Chat], guard: Guard, deadline: float
) -> list[str]:
    """Return the answers that are complete before the deadline, in seconds of `time.monotonic`."""

    def go_on(*_: object) -> None:
        if guard.stop_requested:
            raise RuntimeError("a signal asked to stop")
        if time.monotonic() > deadline:
            raise _OutOfTime
        guard.heart.tick()  # a large model may take seconds per token here, which is not a hang

    model.register_forward_pre_hook(go_on)
    ask_for_one_answer(model.generation_config)
    settings = Settings(_MAX_ANSWER_TOKENS, temperature=0)
    answers = list[str]()
    with contextlib.suppress(_OutOfTime):
        for prompt in prompts:
            ids_BT = torch.tensor([encoder.prompt_ids(prompt)])
            pixels = encoder.pixels_in(prompt.messages, ids_BT)
            answers.append(generate(model.eval(), encoder, ids_BT, settings, pixels=pixels).text.strip())
    return answers


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {textwrap.shorten(str(error), _MAX_SHOWN)}"


def shown(messages: list[Message]) -> str:
    """Return a prompt as text: a single question as it is, a conversation with the roles of its turns."""
    if len(messages) == 1:
        return _with_places(messages[0])
    return "\n".join(f"{message['role']}: {_with_places(message)}" for message in messages)


def _with_places(message: Message) -> str:
    """Return the text of a turn, with `<image>` for each image, and with its calls of tools."""
    content = message["content"]
    if not isinstance(content, list):
        return spoken(message)
    return "".join("<image>" if part["type"] == "image" else part["text"] for part in content)


def same_text(answer: str, right: str) -> bool:
    """Return whether two texts are equal apart from white space."""
    return answer.split() == right.split()
