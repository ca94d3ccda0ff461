"""Whether a loaded model is whole: every weight comes from the checkpoint, and every token has a row of embeddings.

transformers fills missing weights with random numbers, and ignores weights without a place; it only warns about both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers.core_model_loading import dot_natural_key

from tuner import vocabulary
from tuner.errors import ModelError
from tuner.recipes.schema import RecipeConfig
from tuner.vocabulary import Vocabulary

HEAD = "score"
"""What every decoder that transformers can let score texts calls its head."""
_LEARNED = ("weight", "bias")
"""How the names of what modules learn end; masks and tables that older versions saved have names of their own."""
_FIX = "Download or copy the model again with its config.json: they belong to different models, or are incomplete."


def check(model: Any, report: Mapping[str, Any], path: str, layers: Any, *, new_head: bool) -> None:
    """Check what `from_pretrained` reports with `output_loading_info`.

    Args:
        model: What was loaded.
        report: `missing_keys` and `unexpected_keys`; shapes that do not fit, it raises itself.
        path: Where it was loaded from.
        layers: The model's decoder layers.
        new_head: The checkpoint is of a model that writes, and this one scores: its head is meant to be new.

    Raises:
        ModelError: a weight is missing, or one that the model would need has no place in it.
    """
    missing = [name for name in report["missing_keys"] if not (new_head and name.startswith(f"{HEAD}."))]
    others = list(report["unexpected_keys"])
    if missing:
        what = f"{_told(missing)} of the weights that its config.json asks for are missing in {path!r}"
        if others:
            what += f", which holds {_told(others)} that the model does not have"
        raise ModelError(f"{what}; they would be random", where="model.path", fix=_FIX)
    places = dict(model.named_modules(remove_duplicate=False))
    lost = [name for name in others if _is_lost(name, places, layers, model.config.get_text_config())]
    if lost:
        what = f"{_told(lost)} of the weights in {path!r} are not part of the model that its config.json describes"
        raise ModelError(f"{what}; they would be ignored", where="model.path", fix=_FIX)


def _told(names: Iterable[str]) -> str:
    ordered = sorted(names, key=dot_natural_key)
    return f"{len(ordered)} ({ordered[0]}{', ...' if len(ordered) > 1 else ''})"


def _is_lost(name: str, places: Mapping[str, Any], layers: Any, config: Any) -> bool:
    """Return whether a weight without a place belongs to what the model computes.

    Other heads, towers for images and layers that predict further tokens do not; a bias that config.json switches off,
    a part of a decoder layer that this kind of model has not, and a layer more than config.json counts do.
    """
    parent, _, last = name.rpartition(".")
    if parent in places:
        # torch keeps the place of a weight that is switched off
        return hasattr(places[parent], last) and getattr(places[parent], last) is None
    within = next((f"{place}." for place, module in places.items() if module is layers), None)
    if within is None or not name.startswith(within) or last not in _LEARNED:
        return False
    number = name.removeprefix(within).partition(".")[0]
    num_predicting = getattr(config, "num_nextn_predict_layers", None) or 0
    return not (number.isdecimal() and len(layers) <= int(number) < len(layers) + num_predicting)


# A row for each token


def fit_rows(model: Any, vocab: Vocabulary, config: RecipeConfig, path: str) -> None:
    """Add the rows that the tokenizer needs, where the recipe asks for them; the same ones on every rank and each time.

    Raises:
        ModelError: rows are lacking, and the recipe asks for none, or would not train them.
    """
    last, num_rows = vocab.last, num_rows_of(model)
    if last is None or last[1] < num_rows:
        return
    if not config.model.resize_embeddings:
        raise vocabulary.too_few_rows(*last, num_rows, path)
    trained = config.adapter.modules_to_save or () if config.adapter else ()
    lacking = tuple(name for name in _names(model) if name not in trained)
    if lacking and (config.adapter or config.train_cfg.trainable_layers):
        raise vocabulary.untrained_rows(lacking, adapter=config.adapter is not None)
    with torch.random.fork_rng():
        torch.manual_seed(config.randomness.seed)
        model.resize_token_embeddings(last[1] + 1)  # transformers draws new rows around the mean of the old ones


def num_rows_of(model: Any) -> int:
    """Return the rows of the input embeddings; ZeRO-3 has taken the weight itself apart."""
    weight = model.get_input_embeddings().weight
    return int(getattr(weight, "ds_shape", weight.shape)[0])


def _names(model: Any) -> tuple[str, ...]:
    """Return the last parts of the names of the modules that have a row for each token."""
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    names = (
        (name for name, one in model.named_modules() if one is module) for module in embeddings if module is not None
    )
    return tuple(next(name).rpartition(".")[2] for name in names)
