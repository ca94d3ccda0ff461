from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tuner.data import sources
from tuner.data.prepare import prepare
from tuner.data.prepared import Prepared
from tuner.data.text_encoder import TextEncoder
from tuner.recipes import schema

Write, Prepare = Callable[..., Path], Callable[..., Prepared]

CORPUS = [
    "Why is the sky blue? Because the air scatters blue light.",
    "system user assistant tool model Human Assistant instruction input output",
    "One two three four five six seven eight nine ten, and so on.",
]
SPECIAL = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

WITH_TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(template: str | None = CHATML, *, pads: bool = False) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    # As Llama's does: a second <s> comes if the template has written one already.
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<s>" if pads else None}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


class Settings(schema.Dataset):
    """A recipe's dataset block."""

    max_length: int = 64
    packing: bool = True

    def __init__(self, path: str | None, **settings: Any) -> None:
        super().__init__(path=path, **settings)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    return folder


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Yield the warnings that are logged, as they come."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger()
    root.addHandler(handler)
    yield lines
    root.removeHandler(handler)


@pytest.fixture
def jsonl(tmp_path: Path) -> Write:
    def write(rows: list[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def prepared(jsonl: Write, tokenizer: Any) -> Prepare:
    """Return what prepares rows, a file of them or a mixture, for an objective under the settings of a data set."""

    def of(
        rows: list[Any] | Path | None, objective: str = "sft", *, tokenizer: Any = tokenizer, **settings: Any
    ) -> Prepared:
        path = rows and str(jsonl(rows) if isinstance(rows, list) else rows)
        return prepare(Settings(path, **settings), TextEncoder(tokenizer), objective=objective)

    return of


def read_rows(path: Path | str, split: str = "train") -> list[tuple[str, dict[str, object]]]:
    return list(sources.find(str(path), split=split).read())


def zst(data: bytes) -> bytes:
    packed: bytes = pa.Codec("zstd").compress(data, asbytes=True)
    return packed


def conversation(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[at % 2], "content": turn} for at, turn in enumerate(turns)]}
