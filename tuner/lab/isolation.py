"""Tries whether a model that no test knows keeps the samples of one row apart: on a small model of its kind.

`measuring` calls it, in a process of its own. What is in doubt is not apart: its reason is given instead.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tuner.data.batches import SampleCollator, side_by_side
from tuner.lab.compat_meta_tensors import META, NO_CODE, attention_of, decoder_layers
from tuner.models.mixers import keep_samples_apart

_LENGTHS = (70, 13, 37)
"""Tokens of three samples: more than the small model's windows and chunks, and one is longer than a kernel's chunk."""
_CLOSE = 1e-5
"""What samples of a row may differ from the same ones alone, as a part of the largest number, in fp64."""
_SEEN = 1e-3
"""What they must differ at least without positions: a trial that sees no mix shows nothing."""
_FACTORS = (32, 16, 8, 4, 2, 1)
"""By which widths are divided, until a model can be built and run."""
_LEAST_WIDTH = 64
"""Narrower hidden states lose what they hold: those of width 1 are all alike once they are normed."""
_MOST_PARAMETERS = 40_000_000
_SPREAD = 0.15
"""Of the weights: as large that a sample that sees another differs plainly."""
_VOCABULARY, _WINDOW, _MOST_EXPERTS, _EXPERTS_A_TOKEN = 256, 16, 16, 4
_WIDTHS = re.compile(r"hidden_size|d_model|n_embd|intermediate|ffn|d_ff|inner|width|d_ssm|heads?$")
_WINDOWS = re.compile(r"window|chunk|block_size")
_A_TOKEN = re.compile(r"per_tok|^moe_k$|^moe_topk$|^top_k_experts$")
_CHOOSERS = re.compile(r"Indexer|Compress|Sparse(?!M[oO][eE])")
"""Names of modules that choose which tokens are attended to: short rows do not show what they do in long ones."""
_Kind = tuple[tuple[str, str, object], ...]


class Doubtful(Exception):
    """Samples may see each other; the text says why."""


def attention_that_packs(config: Any, attention: str | None, code: Mapping[str, Any] = NO_CODE) -> str:
    """Return the attention with which samples of one row are as they are alone, in logits and in gradients.

    Args:
        config: The whole model's.
        attention: That of the run; None: transformers' choice.
        code: The arguments that say which code of the model's own may run.

    Raises:
        Doubtful: They are not, or the trial does not show it.
    """
    if attention not in (None, "sdpa", "eager"):
        raise Doubtful(f"{attention} cannot be tried on a CPU")
    full_model = _built(config, attention, torch.bfloat16, code, META)
    if chooser := next(_choosers(full_model, config), None):
        raise Doubtful(f"{chooser} chooses the tokens that are attended to")
    kinds = _kinds(full_model)
    num = min(len(kinds), max(2, *(kinds.index(kind) + 1 for kind in kinds)))
    why = "no small model of its kind can be built"
    width = config.get_text_config().hidden_size
    for factor in (factor for factor in _FACTORS if factor == 1 or width // factor >= _LEAST_WIDTH):
        try:
            small = narrowed(config, factor, num)
            on_meta = _built(small, attention, torch.float64, code, META)
            if sum(weight.numel() for weight in on_meta.parameters()) > _MOST_PARAMETERS:
                continue
            if _pattern(_kinds(on_meta)) != _pattern(kinds[:num]):
                why = "a small model has other kinds of layers"
                continue
            model = _built(small, attention, torch.float64, code)
            problem = mixes(model)
        except Exception as error:  # each model's own code: the next factor may do
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        if problem:
            raise Doubtful(problem)
        return attention_of(model.config.get_text_config())
    raise Doubtful(why)


def _built(
    config: Any, attention: str | None, dtype: torch.dtype, code: Mapping[str, Any] = NO_CODE, device: str = "cpu"
) -> Any:
    options = {"dtype": dtype, **code, "experts_implementation": "eager"}
    if attention:
        options["attn_implementation"] = attention
    config = copy.deepcopy(config)
    if device == META:
        with torch.device(META), no_init_weights():
            return AutoModelForCausalLM.from_config(config, **options)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and decays stay near what they are; a gate that begins at 0 would hide what it scales.
            begin = parameter.clone() if parameter.ndim < 2 else 0
            parameter.normal_(0, _SPREAD).add_(begin)
    keep_samples_apart(model)
    return model


def _choosers(model: nn.Module, config: Any) -> Iterator[str]:
    yield from (type(module).__name__ for module in model.modules() if _CHOOSERS.search(type(module).__name__))
    yield from (key for key in vars(config.get_text_config()) if key.startswith("index_"))


def _kinds(model: Any) -> list[_Kind]:
    """Return what makes each layer differ: its modules, and what they hold in plain values but the layer's number."""
    layers = decoder_layers(model)
    if layers is None:
        raise Doubtful("it has no list of decoder layers")
    values: list[dict[tuple[str, str], object]] = [dict(_plain(layer)) for layer in layers]
    keys = {key for of_layer in values for key in of_layer}
    numbers = {key for key in keys if _counts([of_layer[key] for of_layer in values if key in of_layer])}
    return [tuple((*key, of_layer[key]) for key in sorted(of_layer.keys() - numbers, key=str)) for of_layer in values]


def _counts(values: list[Any]) -> bool:
    """Return whether the values number the layers that have them."""
    return all(type(value) is int for value in values) and all(value < other for value, other in pairwise(values))


def _plain(layer: nn.Module) -> Iterator[tuple[tuple[str, str], object]]:
    for name, module in layer.named_modules():
        yield (name, "class"), type(module).__name__
        for key, value in vars(module).items():
            if value is None or isinstance(value, bool | int | str):
                yield (name, key), value


def _pattern(kinds: list[_Kind]) -> list[int]:
    return [kinds.index(kind) for kind in kinds]


def narrowed(config: Any, factor: int, num_layers: int) -> Any:
    """Return the config of a model with the first layers, narrower, with few experts, words, and short windows."""
    small = copy.deepcopy(config)
    half = small.get_text_config()
    total = half.num_hidden_layers
    for key, value in [*vars(half).items()]:
        if key.startswith("_"):
            continue
        is_by_layer = isinstance(value, list | tuple) or (isinstance(value, str) and "pattern" in key)
        if is_by_layer and len(value) == total:
            setattr(half, key, value[:num_layers])
        elif key.endswith("_token_id") and value is not None:
            setattr(half, key, 0)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            setattr(half, key, _narrow(key, value, factor))
    half.num_hidden_layers = num_layers
    return small


def _narrow(key: str, value: int, factor: int) -> int:
    if key.startswith("vocab_size"):
        return min(value, _VOCABULARY)
    if key in ("n_group", "topk_group"):
        return 1
    if _A_TOKEN.search(key):
        return min(value, _EXPERTS_A_TOKEN)
    if _WINDOWS.search(key):
        return min(value, _WINDOW)
    if "expert" in key and not _WIDTHS.search(key):
        return min(value, _MOST_EXPERTS)
    return max(1, value // factor) if _WIDTHS.search(key) else value


def mixes(model: Any) -> str | None:
    """Return in what samples of one row differ from the same ones alone; None if they do not."""
    torch.manual_seed(0)
    ids = torch.randint(3, model.config.get_text_config().vocab_size, (sum(_LENGTHS),))
    ends = [0, *accumulate(_LENGTHS)]
    samples = [ids[begin:end].tolist() for begin, end in pairwise(ends)]
    alone = [_logits(model, {"input_ids": torch.tensor([sample])})[0] for sample in samples]
    weights = [torch.randn_like(logits) for logits in alone]
    of_alone = _gradients(model, alone, weights)

    in_one = _row(samples)
    end_to_end = SampleCollator(DataCollatorForLanguageModeling(0, padding_free=True), needs_mask=False)([in_one])
    packed = _logits(model, end_to_end)[0].split(_LENGTHS)
    of_packed = _gradients(model, packed, weights)
    if (difference := _difference(packed, alone)) > _CLOSE:
        return f"samples of one row see each other: logits differ by {difference:.0e}"
    if (difference := _difference(of_packed, of_alone)) > _CLOSE:
        return f"samples of one row see each other: gradients differ by {difference:.0e}"

    with torch.no_grad():
        two = _logits(model, side_by_side([_row(samples[:2]), _row(samples[2:])], 0))
        in_rows = [*two[0].split(_LENGTHS[:2]), two[1, : _LENGTHS[2]]]
        unknown = _logits(model, {"input_ids": ids[None]})[0].split(_LENGTHS)
    if (difference := _difference(in_rows, alone)) > _CLOSE:
        return f"samples of two rows see each other: logits differ by {difference:.0e}"
    if _difference(unknown[1:], alone[1:]) < _SEEN:
        return "the trial shows nothing: samples would not be seen to see each other"
    return None


def _row(samples: list[list[int]]) -> dict[str, Any]:
    ids = [token for sample in samples for token in sample]
    return {"input_ids": ids, "labels": ids, "seq_lengths": [len(sample) for sample in samples]}


def _logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits: Tensor = model(**{key: value for key, value in batch.items() if key != "labels"}, use_cache=False).logits
    return logits


def _gradients(model: Any, logits: Any, weights: list[Tensor]) -> list[Tensor]:
    total = torch.stack(
        [(logits_of_sample * weight).sum() for logits_of_sample, weight in zip(logits, weights, strict=True)]
    ).sum()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(total, trained, allow_unused=True)
    return [gradient for gradient in gradients if gradient is not None]


@torch.no_grad()  # type: ignore[untyped-decorator]
def _difference(actual: Any, expected: Any) -> float:
    """Return the largest difference of tensors in pairs, as a part of the largest number of all."""
    if [tensor.shape for tensor in actual] != [tensor.shape for tensor in expected]:
        return math.inf
    max_difference = torch.stack(
        [(tensor - other).abs().max() for tensor, other in zip(actual, expected, strict=True)]
    ).max()
    share = float(max_difference / torch.stack([other.abs().max() for other in expected]).max())
    return share if math.isfinite(share) else math.inf
