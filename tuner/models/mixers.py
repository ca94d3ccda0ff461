"""Keep the samples of a row apart in models that attention alone does not keep apart.

Hybrid models mix tokens in some layers with a convolution or a recurrent state. transformers 5.24 resets neither where
a sample begins: one sample is carried into the next, mostly without an error. Such a layer computes here one sample
after the other, or by GPU kernels that are told where samples begin, once a trial has shown that they keep them apart.
Other models make their attention masks without `position_ids`: they are handed masks made with them. And some count
the padding in front of a sample among its tokens: they are told where its tokens are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate, chain
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_masks_for_generate

from tuner.machine import libraries

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
"""Ends of the names of their classes in transformers 5.24."""
_PAST_LAYERS = {
    "JambaMambaMixer": ("dt_proj",),
    **dict.fromkeys(("FalconMambaMixer", "MambaMixer"), ("dt_proj", "out_proj", "x_proj")),
    **dict.fromkeys(("BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "Mamba2Mixer"), ("out_proj",)),
    **dict.fromkeys(("NemotronHMamba2Mixer", "Zamba2MambaMixer"), ("out_proj",)),
}
"""Classes of mixers in transformers 5.24 -> the linear layers past which they read the weights: Jamba's always, unless
it is quantized, and the others with the kernels of mamba_ssm. All read that of their convolution."""
_CONVOLUTIONS = ("conv", "conv1d")
_MASKS_WITHOUT_POSITIONS = ("afmoe", "gpt_oss", "granitemoehybrid")
_PLACED_IN_ROW = ("gpt2", "gpt_bigcode", "gpt_neo", "hunyuan_v1_dense")
"""model_types that compute a token otherwise behind padding: they are told its place in its sample."""
_LENGTHS = "sample_lengths"
"""Of the samples of each row, on its way through the decoder's keyword arguments to its layers: a layer that is
recomputed gets them again. None: each row is one sample."""
_OF_WHOLE_ROW = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments that say where the samples of a row are: transformers refuses them without a compiled kernel."""
_CACHE = "cache"
"""What a cache is called. A decoder makes one by itself: a mixer would carry the state of one sample into the next."""
_TRIAL = (70, 13)
"""Tokens of two samples: a chunk of the kernels, 64 tokens, ends within the first."""
_OTHER_NAMES = ("cu_seqlens",)
"""What kimi_linear does not pass on to its kernel, which has another name for it (transformers 5.24)."""
Lengths = list[list[int]]
Found = dict[type[nn.Module], tuple[str, ...] | None]
"""For each kind of mixer that was tried: the arguments with which its kernels keep samples apart, or None."""


def mixers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that mix the tokens of a row without attention: a convolution, a recurrent state or both."""
    return [module for module in model.modules() if type(module).__name__.endswith(_MIXERS)]


def past_layers(mixer: nn.Module) -> dict[str, str]:
    """Return the layers whose weights a mixer reads itself, so that LoRA on them never learns, and when it does."""
    kind = type(mixer).__name__
    is_jamba, names = kind.startswith("Jamba"), _PAST_LAYERS.get(kind, ())
    if is_jamba and getattr(mixer.config, "quantization_config", None):
        names = ()
    when = "" if is_jamba else ", with the kernels of mamba_ssm"
    convolutions = {name: "" for name in _CONVOLUTIONS if hasattr(mixer, name)}
    return convolutions | dict.fromkeys(names, when)


def keep_samples_apart(model: PreTrainedModel) -> None:
    """Let the mixers and the masks of a loaded model keep apart what `position_ids` say are samples of their own.

    A batch with an attention mask or a cache is left as it is: its rows are one sample each.
    """
    mixer_modules, kind = mixers(model), model.config.get_text_config().model_type
    if kind in _PLACED_IN_ROW:
        model.base_model.register_forward_pre_hook(_place, with_kwargs=True)
    needs_masks = kind in _MASKS_WITHOUT_POSITIONS
    if not mixer_modules and not needs_masks:
        return
    decoder = model.get_decoder()
    if needs_masks:
        decoder.register_forward_pre_hook(_hand_masks, with_kwargs=True)
    tried: Found = {}
    for mixer in mixer_modules:
        setattr(mixer, _LENGTHS, None)
        mixer.forward = MethodType(partial(_keep_apart, tried), mixer)
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
    alone = batch.get("attention_mask") is None and batch.get(_CACHE) is None
    return alone and positions is not None and positions.ndim == 2  # three dimensions: positions within images


def _place(decoder: PreTrainedModel, args: tuple[Any, ...], batch: dict[str, Any]) -> Any:
    """Tell tokens their places in rows that are padded on the left; generation, with its cache, tells them itself."""
    mask, knows = batch.get("attention_mask"), batch.get("position_ids") is not None
    if knows or mask is None or mask.ndim != 2 or batch.get(_CACHE) is not None:
        return None
    return args, {**batch, "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}


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
    return None if args else ((options.pop("hidden_states"),), options)


def _telling(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a kind of decoder layer that tells its mixers how long the samples are.

    transformers 5.24 recomputes a layer's forward without its hooks, so a hook would not do; its layers expect to be
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


def _keep_apart(tried: Found, mixer: nn.Module, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
    """Compute a mixer on [S, T, hidden], with no sample of a row in another."""
    lengths: Lengths | None = getattr(mixer, _LENGTHS)
    compute = partial(type(mixer).forward, mixer)
    options = {name: value for name, value in options.items() if name not in _OF_WHOLE_ROW}
    if lengths is None:
        mixed: Tensor = compute(hidden_states, *args, **options)
        return mixed
    compute = partial(compute, **{name: value for name, value in options.items() if name != _CACHE})
    kind = type(mixer)
    if kind not in tried:
        tried[kind] = _find_arguments(compute, hidden_states) if _has_kernels(hidden_states) else None
    names = tried[kind]
    if names is not None and not args:
        return _by_kernels(compute, hidden_states, list(chain(*lengths)), names)
    rows = zip(hidden_states.split(1), lengths, strict=True)
    samples = ([compute(sample, *args) for sample in row.split(of_row, dim=1)] for row, of_row in rows)
    return torch.cat([torch.cat(of_row, dim=1) for of_row in samples])


def _has_kernels(hidden_states: Tensor) -> bool:
    return hidden_states.is_cuda and any(map(libraries.is_installed, libraries.KERNELS))


def _by_kernels(
    compute: Callable[..., Tensor], hidden_states: Tensor, lengths: list[int], names: tuple[str, ...]
) -> Tensor:
    """Compute all rows as one, [1, S * T, hidden], with the places where samples begin and end under these names."""
    device = hidden_states.device
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    samples = torch.arange(len(lengths), dtype=torch.int32, device=device)
    of_tokens = samples.repeat_interleave(torch.tensor(lengths, device=device), output_size=sum(lengths))
    boundaries = {"cu_seq_lens_q": ends, "seq_idx": of_tokens[None], **dict.fromkeys(names, ends)}
    return compute(hidden_states.reshape(1, -1, hidden_states.shape[-1]), **boundaries).reshape(hidden_states.shape)


def _find_arguments(compute: Callable[..., Tensor], hidden_states: Tensor) -> tuple[str, ...] | None:
    """Return the arguments, beside the usual, with which a mixer's kernels keep two samples apart; None without any.

    The second sample must come out equal to the last bit beside two different first ones. What the samples hold is made
    without random numbers, so that those of the run stay where they are.
    """
    first, second = _TRIAL
    wave = torch.arange(sum(_TRIAL) * hidden_states.shape[-1], device=hidden_states.device).sin()
    row = wave.to(hidden_states.dtype).reshape(1, sum(_TRIAL), -1)
    other = torch.cat([row[:, :first].flip(1), row[:, first:]], dim=1)
    for names in ((), _OTHER_NAMES):
        try:
            with torch.no_grad():
                mixed, beside_other = (_by_kernels(compute, trial, [first, second], names) for trial in (row, other))
        except (TypeError, ValueError):  # an argument that it does not know, or a part of it without a kernel
            continue
        if torch.equal(mixed[:, first:], beside_other[:, first:]) and not torch.equal(mixed, beside_other):
            return names
    return None
