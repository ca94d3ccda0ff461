"""What a smoke test needs from heavy libraries: a small random model, a tokenizer, rows, and comparisons of results.

It starts no ranks; `lab.smoke` does.
"""

from __future__ import annotations

import re
from pathlib import Path

import peft
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tuner import assets, paths
from tuner.data.encoder import Encoder
from tuner.data.prepare import describe, prepare
from tuner.data.sources import find
from tuner.errors import DataError, MachineError, ModelError, TunerError
from tuner.files import JsonObject
from tuner.lab.shrink import config_of, shrink
from tuner.models.load import load_tokenizer, source
from tuner.recipes.schema import Dataset, Model, Rows
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.objectives import RowKind, facts_of

_TEXT = "Say what the capital of Denmark is, and what 2 + 4 makes."
_TINY = f"{assets.ASSET}tiny"
_SAMPLE, _PAIRS = f"{assets.ASSET}sample/train.jsonl", f"{assets.ASSET}sample_preferences/train.jsonl"
_STAND_INS: dict[RowKind, JsonObject] = {
    "conversations": {"path": _SAMPLE, "format": "messages"},
    "texts": {"path": _PAIRS, "format": "text", "columns": {"text": "{prompt}\n{chosen}"}},
    "pairs": {"path": _PAIRS, "format": "preference"},
    "prompts": {"path": _SAMPLE, "format": "messages"},
    "judged": {"path": _PAIRS, "format": "preference"},
}
_CONTROL = re.compile(r"<[^<>\s{}'\"]+>")
_SHORT = 256
"""Tokens per sample, unless samples only fit at the recipe's own length."""


def tokenizer_of(model: Model) -> tuple[PreTrainedTokenizerBase, bool]:
    """Return the recipe's tokenizer and True, or the package's small one with the recipe's template and False.

    The small one stands in for a tokenizer on the hub that is not in the cache; call it offline.

    Raises:
        ModelError: a local model's tokenizer cannot be loaded.
    """
    assert model.path is not None, "checked before"
    try:
        return load_tokenizer(model, source(model)), True
    except (MachineError, ModelError):
        if paths.local(model.path):
            raise
    small = model.model_copy(update={"path": _TINY, "revision": None, "trust_remote_code": False})
    tokenizer = load_tokenizer(small, assets.asset(_TINY))
    # Each control word is one token, as in the template's own tokenizer.
    tokenizer.add_tokens(sorted(set(_CONTROL.findall(tokenizer.chat_template))), special_tokens=True)
    return tokenizer, False


def make_model(
    facts: Architecture, tokenizer: PreTrainedTokenizerBase, folder: Path, seed: int
) -> tuple[Architecture, int]:
    """Write a small random model of the same architecture with this tokenizer; return its facts and parameters.

    Raises:
        ModelError: transformers cannot build this architecture.
    """
    try:
        small = shrink(facts, -(-len(tokenizer) // 64) * 64)
        config = config_of(small)
    except ValueError as error:
        problem = f"cannot build a small model of model_type {facts.model_type!r}: {error}"
        raise ModelError(problem, where="architecture", fix="Train it without a smoke test.") from error
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    transformers.set_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return small, model.num_parameters()


def stand_in(rows: Rows, objective: str) -> JsonObject | None:
    """Return what to train on instead of rows that are on the hub and not in the cache; None where they are here.

    Raises:
        DataError: they are here, and no data set.
    """
    assert rows.path is not None, "checked before"
    if paths.local(rows.path) is None:
        try:
            find(rows.path, rows.name, rows.split)
        except MachineError:
            return {"name": None, "split": "train", "columns": None, **_STAND_INS[facts_of(objective).rows]}
    return None


def prepared(dataset: Dataset, encoder: Encoder, objective: str) -> tuple[Dataset, str]:
    """Prepare the rows as the ranks will; return the block, cut to short samples where that keeps any, and a summary.

    Raises:
        DataError: a row, the chat template or the recipe's length is wrong.
    """
    short = dataset.model_copy(update={"max_length": min(dataset.max_length, _SHORT)})
    try:
        prepared_rows = prepare(short, encoder, objective=objective)
    except DataError:
        # Prompts may be longer than that; whatever else is wrong, is so at the recipe's own length too.
        short, prepared_rows = dataset, prepare(dataset, encoder, objective=objective)
    return short, describe(prepared_rows)


def difference(left: Path, right: Path, *, scores: bool) -> float:
    """Return how far two saved results are apart: the largest difference of their outputs over the largest output.

    Both are loaded with plain transformers and peft, in fp32 on a base that is not quantized.

    Raises:
        TunerError: an output is not finite.
    """
    first, second = _outputs(left, scores), _outputs(right, scores)
    return float((first - second).abs().max() / first.abs().max().clamp(min=1e-30))


def _outputs(folder: Path, scores: bool) -> torch.Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits: torch.Tensor = _load(folder, scores).eval()(**tokenizer(_TEXT, return_tensors="pt")).logits
    if not logits.isfinite().all():
        raise TunerError(f"{folder.name} reloads with non-finite outputs")
    return logits


def _load(folder: Path, scores: bool) -> PreTrainedModel | peft.PeftModel:
    if (folder / "adapter_config.json").is_file():
        if scores:
            return peft.AutoPeftModelForSequenceClassification.from_pretrained(
                folder, num_labels=1, dtype=torch.float32
            )
        return peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    auto = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModelForCausalLM
    model, report = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            raise TunerError(f"{folder.name} reloads with {kind.replace('_', ' ')}: {sorted(map(str, report[kind]))}")
    return model
