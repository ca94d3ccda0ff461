"""Whether a loaded model is whole: every weight comes from the checkpoint, and every token has a row of embeddings.

transformers fills missing weights with random numbers, and ignores weights without a place; it only warns about both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from transformers.core_model_loading import dot_natural_key

from tuner import vocabulary
from tuner.errors import ModelError
from tuner.recipes.schema import RecipeConfig
from tuner.vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

HEAD = "score"
"""The name of the head in every reward model of transformers."""
_LEARNED = ("weight", "bias")
"""The last part of the names of trained weights; masks and tables that older versions saved have other names."""
_SCALES = ("weight_scale", "weight_scale_inv", "SCB")
"""The last part of the names of what a weight in 8 bits is multiplied by; without it the weight is cast as it is."""
_FIX = "Download or copy the model again with its config.json: they belong to different models, or are incomplete."


def check_tensors(
    path: str, other_shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]], failed: Mapping[str, str]
) -> None:
    """Check that each tensor of a checkpoint fits the model.

    Args:
        other_shapes: Tensors whose shape in the files is not that by config.json, with both.
        failed: Tensors of the model that could not be made of several in the files, with the reason.

    Raises:
        ModelError: there is such a tensor.
    """
    for name in sorted(other_shapes, key=dot_natural_key):
        shape, expected = other_shapes[name]
        problem = f"{name} has the shape {shape} in {path!r}, and {expected} by its config.json"
        raise ModelError(problem, where="model.path", fix=_FIX)
    for name in sorted(failed, key=dot_natural_key):
        problem = f"{name} cannot be made of the tensors in {path!r}: one is missing, or has another shape"
        raise ModelError(f"{problem} ({failed[name]})", where="model.path", fix=_FIX)


def check(
    model: PreTrainedModel,
    report: Mapping[str, Iterable[str]],
    path: str,
    layers: torch.nn.ModuleList | None,
    *,
    new_head: bool,
) -> None:
    """Check the report of `from_pretrained` with `output_loading_info`.

    Args:
        report: `missing_keys` and `unexpected_keys`; `check_tensors` has looked at the shapes.
        layers: The decoder layers of the model.
        new_head: A reward model is made from the checkpoint of a language model, so its head is new.

    Raises:
        ModelError: a weight is missing, or a weight that the model would need has no place in it.
    """
    missing = [name for name in report["missing_keys"] if not (new_head and name.startswith(f"{HEAD}."))]
    unexpected = list(report["unexpected_keys"])
    if missing:
        message = f"{_count_and_first(missing)} of the weights that its config.json asks for are missing in {path!r}"
        if unexpected:
            message += f", which holds {_count_and_first(unexpected)} that the model does not have"
        raise ModelError(f"{message}; they would be random", where="model.path", fix=_FIX)
    places = dict(model.named_modules(remove_duplicate=False))
    lost = [name for name in unexpected if _is_lost(name, places, layers, model.config.get_text_config())]
    if lost:
        number = _count_and_first(lost)
        message = f"{number} of the weights in {path!r} are not part of the model that its config.json describes"
        raise ModelError(f"{message}; they would be ignored", where="model.path", fix=_FIX)


def check_quantized(model: PreTrainedModel, path: str) -> None:
    """Check that weights are stored by bitsandbytes, as config.json says: a merge into 16 bits may leave that over.

    Raises:
        ModelError: a layer holds plain weights.
    """
    for name, module in model.named_modules():
        if not type(module).__module__.startswith("bitsandbytes"):
            continue
        weight = getattr(module, "weight", None)
        if weight is not None and weight.is_floating_point() and getattr(weight, "quant_state", None) is None:
            problem = f"config.json of {path!r} says that bitsandbytes has quantized its weights, and {name} is not"
            fix = "Remove quantization_config from config.json if the weights have 16 bits: a merge may have left it."
            raise ModelError(problem, where="model.path", fix=fix)


def _count_and_first(names: Iterable[str]) -> str:
    ordered = sorted(names, key=dot_natural_key)
    return f"{len(ordered)} ({ordered[0]}{', ...' if len(ordered) > 1 else ''})"


def _is_lost(
    name: str, places: Mapping[str, torch.nn.Module], layers: torch.nn.ModuleList | None, config: PreTrainedConfig
) -> bool:
    """Return whether a weight without a place would belong to the computation of the model.

    Lost are: a bias that config.json switches off, a part of a decoder layer that this kind of model does not have, a
    layer beyond config.json's number, and the scales of a weight in fewer bits whose quantization_config was taken out.
    Not lost are other heads, towers for images, and layers that predict further tokens.
    """
    parent, _, last = name.rpartition(".")
    if parent in places and last in _SCALES:
        return True
    if parent in places:
        # torch keeps the name of a weight that is switched off, with the value None
        return hasattr(places[parent], last) and getattr(places[parent], last) is None
    within = next((f"{place}." for place, module in places.items() if module is layers), None)
    if layers is None or within is None or not name.startswith(within) or last not in _LEARNED:
        return False
    number = name.removeprefix(within).partition(".")[0]
    num_predicting = getattr(config, "num_nextn_predict_layers", None) or 0
    return not (number.isdecimal() and len(layers) <= int(number) < len(layers) + num_predicting)


# A row for each token


def fit_rows(model: PreTrainedModel, vocab: Vocabulary, config: RecipeConfig, path: str) -> None:
    """Add the embedding rows that the tokenizer needs, if the recipe asks for it; all ranks add the same rows.

    Raises:
        ModelError: rows are missing, and the recipe does not add or train them.
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
        model.resize_token_embeddings(last[1] + 1)  # transformers draws new rows around the mean of the old rows


def num_rows_of(model: PreTrainedModel) -> int:
    """Return the number of rows of the input embeddings, also if ZeRO-3 has sharded the weight."""
    weight = model.get_input_embeddings().weight
    return int(getattr(weight, "ds_shape", weight.shape)[0])


def _names(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the last parts of the names of the input and output embeddings."""
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    names = (
        (name for name, other in model.named_modules() if other is module)
        for module in embeddings
        if module is not None
    )
    return tuple(next(name).rpartition(".")[2] for name in names)
