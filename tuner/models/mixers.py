"""Keep the samples of a row apart in models that attention alone does not keep apart.

Hybrid models mix tokens in some layers with a convolution or a recurrent state. transformers 5.23 resets neither where
a sample begins: one sample is carried into the next, mostly without an error. Such a layer computes here one sample
after the other. Other models make their attention masks without `position_ids`: they are handed masks made with them.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_masks_for_generate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MIXERS = (
    "BambaMixer",
    "DeltaAttention",
    "DeltaNet",
    "FalconH1Mixer",
    "Mamba2Mixer",
    "MambaLayer",
    "MambaMixer",
    "ShortConv",
)
"""Ends of the names of their classes in transformers 5.23."""
_MASKS_WITHOUT_POSITIONS = ("afmoe", "gpt_oss", "granitemoehybrid")
_LENGTHS = "sample_lengths"
"""Of the samples of each row, on its way through the decoder's keyword arguments to its layers: a layer that is
recomputed gets them again. None: each row is one sample."""
_OF_WHOLE_ROW = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments that say where the samples of a row are: transformers refuses them without a compiled kernel."""
_CACHES = ("cache_params", "past_key_values")
"""Arguments of mixers. A decoder makes a cache by itself: it would carry the state of one sample into the next."""
Lengths = list[list[int]]


def mixers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that mix the tokens of a row without attention: a convolution, a recurrent state or both."""
    return [module for module in model.modules() if type(module).__name__.endswith(_MIXERS)]


def keep_samples_apart(model: PreTrainedModel) -> None:
    """Let the mixers and the masks of a loaded model keep apart what `position_ids` say are samples of their own.

    A batch with an attention mask or a cache is left as it is: its rows are one sample each.
    """
    found = mixers(model)
    needs_masks = model.config.get_text_config().model_type in _MASKS_WITHOUT_POSITIONS
    if not found and not needs_masks:
        return
    decoder = model.get_decoder()
    if needs_masks:
        decoder.register_forward_pre_hook(_hand_masks, with_kwargs=True)
    for mixer in found:
        setattr(mixer, _LENGTHS, None)
        mixer.forward = MethodType(_by_sample, mixer)
        mixer.register_forward_pre_hook(_give_states_first, with_kwargs=True)
    lists = (module for module in decoder.modules() if isinstance(module, nn.ModuleList))
    layers = [layer for layers in lists for layer in layers if mixers(layer)]
    telling = {kind: _telling(kind) for kind in {type(layer) for layer in layers}}
    for layer in layers:
        layer.__class__ = telling[type(layer)]
    # It runs before the masks are made: both look at the mask that the batch came with.
    decoder.register_forward_pre_hook(_tell_layers, with_kwargs=True, prepend=True)


def _are_packed(batch: dict[str, Any]) -> bool:
    """Return whether a batch may hold several samples in a row: it says positions, and has no mask and no cache."""
    positions = batch.get("position_ids")
    alone = batch.get("attention_mask") is None and batch.get("past_key_values") is None
    return alone and positions is not None and positions.ndim == 2  # three dimensions: positions within images


def _hand_masks(decoder: PreTrainedModel, args: tuple[Any, ...], batch: dict[str, Any]) -> Any:
    if not _are_packed(batch):
        return None
    positions = batch["position_ids"]
    of_shape = torch.empty(*positions.shape, 0, dtype=decoder.dtype, device=positions.device)
    masks = create_masks_for_generate(decoder.config, of_shape, None, None, position_ids=positions)
    return args, {**batch, "attention_mask": masks}


def _tell_layers(decoder: nn.Module, args: tuple[Any, ...], batch: dict[str, Any]) -> Any:
    return args, {**batch, _LENGTHS: _lengths(batch["position_ids"]) if _are_packed(batch) else None}


def _give_states_first(mixer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Pass the hidden states by position: torch's backward hooks, and with them ZeRO-3, see no keyword arguments."""
    if args:
        return None
    return (options.pop("hidden_states"),), options


def _telling(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a kind of decoder layer that tells its mixers how long the samples are.

    transformers 5.23 recomputes a layer's forward without its hooks, so a hook would not do; its layers expect to be
    subclassed, and recompute what the subclass does.
    """

    def forward(layer: nn.Module, *args: Any, **options: Any) -> Any:
        lengths = options.pop(_LENGTHS, None)
        for mixer in mixers(layer):
            setattr(mixer, _LENGTHS, lengths)
        return kind.forward(layer, *args, **options)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _lengths(position_ids: Tensor) -> Lengths | None:
    """Return how many tokens the samples of each row have, [S, T]; tokens of padding, each a sample, count as one."""
    rows = [_of_row(row) for row in position_ids.tolist()]
    return rows if any(len(row) > 1 for row in rows) else None


def _of_row(positions: list[int]) -> list[int]:
    begins = [index for index, position in enumerate(positions) if index == 0 or position != positions[index - 1] + 1]
    ends = [*begins[1:], len(positions)]
    lengths: list[int] = []
    was_one = False
    for length in (end - begin for begin, end in zip(begins, ends, strict=True)):
        if was_one and length == 1:  # no label belongs to a token that has no neighbours
            lengths[-1] += 1
        else:
            lengths.append(length)
        was_one = length == 1
    return lengths


def _by_sample(mixer: nn.Module, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
    """Compute a mixer on [S, T, hidden]; where a row holds several samples, on one of them after the other."""
    lengths: Lengths | None = getattr(mixer, _LENGTHS)
    compute = type(mixer).forward
    options = {name: value for name, value in options.items() if name not in _OF_WHOLE_ROW}
    if lengths is None:
        mixed: Tensor = compute(mixer, hidden_states, *args, **options)
        return mixed
    alone = {name: value for name, value in options.items() if name not in _CACHES}
    rows = []
    for row, of_row in zip(hidden_states.split(1), lengths, strict=True):
        rows.append(torch.cat([compute(mixer, sample, *args, **alone) for sample in row.split(of_row, dim=1)], dim=1))
    return torch.cat(rows)
