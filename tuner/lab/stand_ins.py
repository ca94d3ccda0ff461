"""What a smoke test needs from heavy libraries: a small random model, a tokenizer, rows, and comparisons of results.

It starts no ranks; `lab.smoke` does.
"""

from __future__ import annotations

import re
from io import BytesIO
from pathlib import Path
from typing import Any

import peft
import PIL.Image
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tuner import assets, paths
from tuner.data.encoder import Encoder
from tuner.data.prepare import describe, prepare
from tuner.data.sample import Image
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
_IMAGES: JsonObject = {"path": f"{assets.ASSET}sample_images/train.jsonl", "format": "messages"}
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


def stand_in(rows: Rows, objective: str, *, has_images: bool = False) -> JsonObject | None:
    """Return what to train on instead of rows that are on the hub and not in the cache; None where they are here.

    Raises:
        DataError: they are here, and no data set.
    """
    assert rows.path is not None, "checked before"
    if paths.local(rows.path) is None:
        try:
            find(rows.path, rows.name, rows.split)
        except MachineError:
            other = _IMAGES if has_images else _STAND_INS[facts_of(objective).rows]
            return {"name": None, "split": "train", "columns": None, "image_folder": None, **other}
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


def difference(left: Path, right: Path, *, scores: bool = False, encoder: Encoder | None = None) -> float:
    """Return how far two saved results are apart: the largest difference of their outputs over the largest output.

    Both are loaded with plain transformers and peft, in fp32 on a base that is not quantized. `encoder`: that of models
    that read images, which are shown one.

    Raises:
        TunerError: an output is not finite.
    """
    first, second = _outputs(left, encoder, scores), _outputs(right, encoder, scores)
    return float((first - second).abs().max() / first.abs().max().clamp(min=1e-30))


def _outputs(folder: Path, encoder: Encoder | None, scores: bool) -> torch.Tensor:
    inputs = _with_a_picture(encoder) if encoder else _tokens(folder)
    model = _load_vision(folder) if encoder else _load(folder, scores)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(**inputs).logits
    if not logits.isfinite().all():
        raise TunerError(f"{folder.name} reloads with non-finite outputs")
    return logits


def _tokens(folder: Path) -> dict[str, torch.Tensor]:
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(_TEXT, return_tensors="pt")
    return {str(name): values for name, values in tokens.items()}


def _with_a_picture(encoder: Encoder) -> dict[str, torch.Tensor]:
    file = BytesIO()
    PIL.Image.radial_gradient("L").convert("RGB").save(file, "PNG")
    parts = [{"type": "image", "image": Image(data=file.getvalue())}, {"type": "text", "text": _TEXT}]
    question = [{"role": "user", "content": parts}]
    ids = encoder.prompt(question)
    return {"input_ids": ids, **encoder.pixels_in(question, ids)}


def _load_vision(folder: Path) -> PreTrainedModel | peft.PeftModel:
    auto = transformers.AutoModelForImageTextToText
    if not (folder / "adapter_config.json").is_file():
        return _checked(folder, auto)
    base = peft.PeftConfig.from_pretrained(folder).base_model_name_or_path
    return peft.PeftModel.from_pretrained(auto.from_pretrained(base, dtype=torch.float32), folder)


def _load(folder: Path, scores: bool) -> PreTrainedModel | peft.PeftModel:
    if (folder / "adapter_config.json").is_file():
        if scores:
            return peft.AutoPeftModelForSequenceClassification.from_pretrained(
                folder, num_labels=1, dtype=torch.float32
            )
        return peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    auto = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModelForCausalLM
    return _checked(folder, auto)


def _checked(folder: Path, auto: Any) -> PreTrainedModel:
    """Load a whole model in fp32.

    Raises:
        TunerError: its weights are not exactly those of its class.
    """
    model: PreTrainedModel
    model, report = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            raise TunerError(f"{folder.name} reloads with {kind.replace('_', ' ')}: {sorted(map(str, report[kind]))}")
    return model
