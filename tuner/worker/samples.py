"""Answers of the trained model to validation prompts, beside the right ones.

It loads the saved result as any user would, so it shows too that the result loads.
"""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tuner.files import write_text
from tuner.recipes.schema import Dataset, RecipeConfig
from tuner.runs.directory import RunDirectory
from tuner.worker.data import mixture
from tuner.worker.data.prepare import located
from tuner.worker.data.reading import Tally, formats_of, samples
from tuner.worker.data.sample import Chat, Feedback, Message, Pair, Sample

_MAX_ANSWER_TOKENS = 64
_MAX_SHOWN = 160


def show_samples(config: RecipeConfig, run: RunDirectory) -> None:
    """Print `log.num_samples` validation prompts with right and given answers; keep them in samples.jsonl."""
    assert config.val_dataloader is not None
    if config.objective.type == "reward":
        print("log.num_samples is not used: a model that scores gives no answers.", flush=True)
        return
    prompts = _prompts(config.val_dataloader.dataset, config.log.num_samples, config.objective.type)
    if not prompts:  # plain text asks nothing
        return
    answers = _answers(run.final, [messages[:-1] for messages in prompts])
    table = Table("prompt", "right answer", "the model's answer", "", title="Validation prompts", title_justify="left")
    lines, num_right = [], 0
    for messages, answer in zip(prompts, answers, strict=True):
        prompt, right = _shown(messages[:-1]), messages[-1]["content"]
        is_right = _same(answer, right)
        num_right += is_right
        table.add_row(
            escape(prompt), escape(right), escape(textwrap.shorten(answer, _MAX_SHOWN)), "✓" if is_right else "✗"
        )
        lines.append(json.dumps({"prompt": prompt, "right": right, "answer": answer, "is_right": is_right}))
    write_text(run.path / "samples.jsonl", "\n".join(lines) + "\n")
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table)
    print(f"{num_right} of {len(prompts)} right.", flush=True)


def _prompts(dataset: Dataset, count: int, objective: str) -> list[list[Message]]:
    """Return conversations that end in a right answer, spread evenly over the split."""
    opened = mixture.open(located(dataset))
    stream = samples(opened, formats_of(opened, objective), objective, Tally([0] * len(opened.sets)))
    chats = [chat for _, sample in itertools.islice(stream, 100_000) if (chat := _right(sample))]
    step = max(1, len(chats) // max(count, 1))
    return chats[::step][:count]


def _right(sample: Sample) -> list[Message] | None:
    """Return a conversation with a right answer at its end, or None for what is none."""
    match sample:
        case Chat(messages=messages):
            return messages
        case Pair(prompt=prompt, chosen=answer) | Feedback(prompt=prompt, completion=answer, label=True):
            return [*prompt, *answer]
    return None


def _answers(folder: Path, prompts: list[list[dict[str, Any]]]) -> list[str]:
    # With ZeRO-3 on, from_pretrained would shard the weights over all ranks; here one rank loads them, as a user would.
    unset_hf_deepspeed_config()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()  # loads an adapter's base too
    found = []
    for prompt in prompts:
        inputs = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=_MAX_ANSWER_TOKENS, do_sample=False)
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        found.append(str(answer).strip())
    return found


def _shown(messages: list[dict[str, Any]]) -> str:
    """Return what the model was given: a lone question as it is, a conversation with the roles of its turns."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _same(answer: str, right: str) -> bool:
    return re.sub(r"\s+", " ", answer).strip() == re.sub(r"\s+", " ", right).strip()
