"""What is mended in transformers and bitsandbytes where models are loaded or written, and the private names for it.

Versions seen: transformers 5.23, TRL 1.16, bitsandbytes 0.50.2. It decides nothing about a model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel, modeling_utils
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key, revert_weight_conversion
from transformers.integrations import sdpa_attention
from transformers.utils.loading_report import LoadStateDictInfo

from tuner.errors import MachineError
from tuner.machine.libraries import KERNELS, require_names

_BACKBONE = "model"


def check_names() -> None:
    """Refuse a transformers without the names that are taken here.

    Raises:
        MachineError: one is gone.
    """
    require_names("transformers", modeling_utils, "_load_state_dict_into_zero3_model")
    require_names("transformers", PreTrainedModel, "_adjust_missing_and_unexpected_keys")
    require_names("transformers", sdpa_attention, "use_gqa_in_sdpa")


@contextmanager
def zero3_told() -> Iterator[set[str]]:
    """Yield a set that gets the names which ZeRO-3's loader finds no place for.

    transformers 5.23 reports none of them there: "we assume only best-case scenario" (modeling_utils.py, 4537).
    No public hook sees what the loader is given.
    """
    unexpected: set[str] = set()
    load = modeling_utils._load_state_dict_into_zero3_model

    def telling(model: Any, state_dict: Any, load_config: Any = None) -> Any:
        unexpected.update(_without_place(model, list(state_dict), load_config.weight_mapping or ()))
        return load(model, state_dict, load_config)

    modeling_utils._load_state_dict_into_zero3_model = telling
    try:
        yield unexpected
    finally:
        modeling_utils._load_state_dict_into_zero3_model = load


def repeat_heads_on_old_gpus(capability: tuple[int, int]) -> None:
    """Let SDPA have keys and values copied to all query heads on GPUs older than compute capability 8.0.

    transformers 5.23 asks torch to group the heads (`enable_gqa`) wherever there is no mask. Torch's flash kernel can
    from 8.0 on and its memory-efficient kernel nowhere, so that an older GPU took the plain one, which holds the scores
    of all pairs of tokens in fp32 (transformers issue 48633).
    """
    if capability < (8, 0):
        sdpa_attention.use_gqa_in_sdpa = lambda *_: False


def _without_place(model: Any, names: Iterable[str], mapping: Iterable[Any]) -> set[str]:
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    expected = model.state_dict()
    renamed = {rename_source_key(name, renamings, converters, model.base_model_prefix, expected)[0] for name in names}
    told = LoadStateDictInfo(set(), renamed - expected.keys(), set(), [], {}, set())
    model._adjust_missing_and_unexpected_keys(told)  # what an architecture says may be left out
    return set(told.unexpected_keys)


def hide_kernels_of_gpus() -> None:
    """Keep transformers from calling packages of CUDA kernels with tensors of the CPU, where there is no GPU."""
    if not torch.cuda.is_available():
        for name in KERNELS:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def keep_4_bits_as_stored(model: Any) -> None:
    """Keep bitsandbytes from repacking 4-bit weights, as it does in eval mode on a CPU with AVX512-BF16.

    ZeRO-3 drops the repacking and is silently wrong from the first evaluation on (validation loss 7.51 instead of 7.28,
    measured on 0.50.2).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def name_parts(model: Any) -> None:
    """Let TRL 1.16 find the layers below the head, and the number of experts for the loss that balances them.

    In transformers 5.23 Llama 4's class names a prefix that is another class's, and Granite's configs call their
    experts local ones, for which others (Mixtral's) keep the usual name too.
    """
    if model.base_model is model and hasattr(model, _BACKBONE):
        model.base_model_prefix = _BACKBONE
    config = model.config.get_text_config()
    if hasattr(config, "num_local_experts") and not hasattr(config, "num_experts"):
        kind = type(config)
        kind.attribute_map = {**kind.attribute_map, "num_experts": "num_local_experts"}


_KEPT = "_weight_conversions"


def keep_conversions(model: Any, conversions: list[Any]) -> None:
    """Leave on a model what `save_pretrained` reverts: `from_pretrained` alone does so (transformers#42396).

    Raises:
        MachineError: this transformers looks for another name, and would revert nothing.
    """
    if _KEPT not in revert_weight_conversion.__code__.co_consts:
        what = f"transformers does not look for {_KEPT} when it saves, which tuner builds on"
        raise MachineError(what, fix="Install the tested versions: pip install -r requirements.txt")
    setattr(model, _KEPT, conversions)
