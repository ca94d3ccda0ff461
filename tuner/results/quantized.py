"""A whole model in 8 or 4 bits, by torchao, as plain transformers and vLLM load it, and what that costs it.

It reads and writes folders of whole models; `export` makes them.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import transformers

from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError, MachineError, Option, TunerError, UsageError
from tuner.files import JsonObject, copy
from tuner.models.load import auto_class
from tuner.pretrained import explained
from tuner.progress import shown
from tuner.recipes.schema import RecipeConfig
from tuner.results.loaded_model import LoadedModel, ModelSpec, encoder_of, logits_of_some, spec_of
from tuner.results.tensors import hashes_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tuner.data.prepared import Prepared

Kind = Literal["fp8", "nvfp4", "int4"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_INSTALL = "pip install 'tuner-deepspeed[quantize]'"
_GROUP = 128
"""Weights of a row that share a scale in int4, as most published models have it."""
_WIDTHS: dict[Kind, int] = {"fp8": 1, "nvfp4": 16, "int4": _GROUP}
"""A row of a layer has a multiple of so many weights: each such group shares a scale. torchao leaves out others."""
_LEAST_REACHED = 0.9
"""Of the weights besides embedding and head, those that are in linear layers: torchao reaches no others."""
_LEAST_GPU = (8, 0)
"""The compute capability that torchao's packing for tensor cores needs."""
_MOST_ROWS = 200
"""Of the rows that the perplexity is measured on, twice."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json", "manifest.json")


@dataclass(frozen=True)
class Losses:
    """What quantization costs: the perplexity of the same rows before and after, by the weights in their files.

    `tokens`: those that carry loss in them. Without rows all three are None. `apart`: how far the logits of some tokens
    are apart, relative to their root mean square.
    """

    kind: str
    apart: float
    before: float | None = None
    after: float | None = None
    tokens: int | None = None

    def to_json(self) -> JsonObject:
        perplexity = {"before": self.before, "after": self.after, "tokens": self.tokens}
        return {"kind": self.kind, "logits_apart": self.apart, "perplexity": perplexity if self.tokens else None}

    def __str__(self) -> str:
        on_logits = f"its logits differ by {self.apart:.1%} of their size"
        if self.tokens is None:
            return f"Quantized to {self.kind}, loaded again by transformers: {on_logits}."
        return (
            f"Quantized to {self.kind}, loaded again by transformers: perplexity {self.before:.4g} before, "
            f"{self.after:.4g} after, on {self.tokens:,} tokens; {on_logits}."
        )


def check(kind: Kind) -> None:
    """Check that this machine can quantize to `kind`.

    Raises:
        MachineError: torchao is missing, or the GPU that packs the weights.
    """
    where = Option("quant", kind)
    if importlib.util.find_spec("torchao") is None:
        raise MachineError(f"{kind} needs torchao, which is not installed", where=where, fix=f"Install it: {_INSTALL}.")
    if kind == "int4" and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= _LEAST_GPU):
        problem = "int4 is packed by a kernel of NVIDIA GPUs from Ampere on, and there is none here"
        fix = (
            f"Export on such a GPU. Elsewhere: {Option('quant', 'nvfp4')}, {Option('quant', 'fp8')}, or a GGUF: "
            f"{Option('format', 'gguf')} {Option('quant', 'q4_0')}."
        )
        raise MachineError(problem, where=where, fix=fix)


def quantize(
    model_folder: Path, dest: Path, kind: Kind, max_shard_bytes: int, recipe: RecipeConfig | None, data: str | None
) -> tuple[Losses, dict[str, JsonObject]]:
    """Write the model in the folder `model_folder` to the new folder `dest` with its linear layers in fewer bits.

    The head and the embedding stay as they are. The result is loaded again, by transformers alone.

    Args:
        recipe: Of the run that trained the model: its validation rows are measured. None: it is not known.
        data: Other rows to measure: a file, or an id on the hub.

    Returns:
        What it costs; file, shape, type and hash of each tensor.

    Raises:
        UsageError: the model scores answers or reads images, or torchao would leave its weights as they are.
        DataError: the rows are wrong.
        TunerError: torchao cannot quantize the model, or the result makes no numbers.
    """
    from tuner.results.evaluate import likelihood  # datasets and TRL: other exports do without

    spec = spec_of(str(model_folder), None)
    if spec.scores or spec.model.images is True:
        why = "reads images" if spec.model.images is True else "scores answers"
        raise UsageError(
            f"a model that {why} was not tried in fewer bits", where=Option("quant", kind), fix="Export it without."
        )
    encoder = encoder_of(spec)
    prepared = _rows(spec, encoder, recipe, data)

    def measured(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, float]]:
        loaded = LoadedModel(spec, model, encoder, model.dtype, 16)
        return logits_of_some(model), likelihood(loaded, prepared, 1) if prepared else {}

    auto = auto_class(reads_images=False)
    load_options: dict[str, Any] = {"dtype": "auto", "trust_remote_code": False}
    load_options |= {"device_map": "auto"} if torch.cuda.is_available() else {}
    with explained(str(model_folder)), shown("measuring the model"):
        model = auto.from_pretrained(model_folder, **load_options).eval()
        _check_layers(model, kind)
        expected, before = measured(model)
        del model
    with explained(str(model_folder)), shown(f"quantizing to {kind}"):
        try:
            model = auto.from_pretrained(model_folder, quantization_config=_config(kind), **load_options)
            model.save_pretrained(dest, max_shard_size=max_shard_bytes)
        except (AssertionError, RuntimeError, ValueError, NotImplementedError) as error:
            [reason, *_] = str(error).strip().splitlines() or [type(error).__name__]
            problem = f"torchao cannot quantize this model to {kind}: {reason}"
            raise TunerError(problem, where=Option("quant", kind), fix="Choose another kind.") from error
        del model
    weight_file_names = {file.name for pattern in _WEIGHTS for file in model_folder.glob(pattern)}
    for file in (path for path in model_folder.rglob("*") if path.is_file() and path.name not in weight_file_names):
        place = dest / file.relative_to(model_folder)  # further chat templates have a folder
        place.parent.mkdir(exist_ok=True)
        copy(file, place)
    with explained(str(dest)), shown("loading it again"):
        logits, after = measured(auto.from_pretrained(dest, **load_options).eval())
    apart = float((logits - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    if not math.isfinite(apart):
        raise TunerError(
            f"the model in {kind} makes no numbers", where=Option("quant", kind), fix="Choose another kind."
        )
    tokens = int(before["tokens"]) if before else None
    losses = Losses(kind, apart, before.get("perplexity"), after.get("perplexity"), tokens)
    return losses, hashes_of(dest)


def _rows(spec: ModelSpec, encoder: TextEncoder, recipe: RecipeConfig | None, data: str | None) -> Prepared | None:
    """Return the rows to measure the perplexity on; None if the run has none, or none that are still there."""
    from tuner.data.prepare import prepare  # as above
    from tuner.results.evaluate import rows_of

    recipe = recipe if recipe and recipe.objective.facts.packs else None  # others compare answers, or have none
    if not (data or (recipe and recipe.val_dataloader)):
        return None
    of_rows = replace(spec, recipe=recipe)
    try:
        return prepare(rows_of(of_rows, data, max_rows=_MOST_ROWS), encoder, objective=of_rows.objective)
    except (DataError, MachineError):
        if data:
            raise
        return None  # the run was moved without its rows, or the hub cannot be reached


def _check_layers(model: PreTrainedModel, kind: Kind) -> None:
    """Check that torchao quantizes the weights of a model, which are in 16 or 32 bits; it is silent about others."""
    where, head = Option("quant", kind), model.get_output_embeddings()
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    ends = {
        module.weight for module in (*model.modules(), head) if isinstance(module, torch.nn.Embedding) or module is head
    }
    total = sum(weight.numel() for weight in model.parameters() if weight not in ends)
    reached = sum(layer.weight.numel() for layer in layers.values()) / max(total, 1)
    if reached < _LEAST_REACHED:
        unreached = f"{1 - reached:.0%} of this model's weights are in others, such as fused experts"
        problem = f"torchao quantizes linear layers, and {unreached}"
        fix = f"Write a GGUF: {Option('format', 'gguf')} {Option('quant', 'q4_0')}."
        raise UsageError(problem, where=where, fix=fix)
    width = _WIDTHS[kind]
    if odd := next((name for name, layer in layers.items() if layer.in_features % width), None):
        problem = f"{odd} has rows of {layers[odd].in_features:,} weights, and {kind} takes multiples of {width}"
        raise UsageError(problem, where=where, fix=f"Choose another kind, such as {Option('quant', 'fp8')}.")


def _config(kind: Kind) -> transformers.TorchAoConfig:
    """Return torchao's configuration of the weights; activations keep their type."""
    from torchao import quantization as of_torchao  # an extra

    if kind == "fp8":
        return transformers.TorchAoConfig(of_torchao.Float8WeightOnlyConfig())  # a scale for each row
    if kind == "nvfp4":
        from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig

        return transformers.TorchAoConfig(NVFP4WeightOnlyConfig())  # a scale in fp8 for 16 weights
    packing = {"int4_packing_format": "tile_packed_to_4d", "int4_choose_qparams_algorithm": "hqq"}
    return transformers.TorchAoConfig(of_torchao.Int4WeightOnlyConfig(group_size=_GROUP, **packing))
