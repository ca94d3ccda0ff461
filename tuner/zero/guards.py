"""Known bugs of DeepSpeed, as one table by version and config, and the functions that search it.

A version has a bug from `first` on, up to `fixed`. Each row's `source` names the thread or the release that says so. A
new row needs an example in the test of this table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from tuner.errors import Key
from tuner.machine.libraries import numbers
from tuner.recipes.merging import lookup
from tuner.zero.config import STEPPING, ZERO, Config, accumulates_in, computes_in, device, is_on, stage

Effect = Literal["wrong", "fails", "slow"]
"""`wrong` trains without an error, to a wrong result. `wrong` and `fails` are refused, `slow` is a warning."""


class Guard(NamedTuple):
    """One known bug of DeepSpeed.

    Args:
        first: The first version that has it; "0" if that is unknown.
        fixed: The first version without it; None if no release has fixed it.
        keys: The key of the config that triggers it.
        holds: Whether a final config triggers it.
        problem: The effect on the run; completes "DeepSpeed 0.19.5: ...".
        instead: What to change if the version stays.
        source: Its issues and pull requests.
        on_gpus: It needs streams or kernels of GPUs.
    """

    first: str
    fixed: str | None
    effect: Effect
    keys: tuple[str, ...]
    holds: Callable[[Config], bool]
    problem: str
    instead: str
    source: str
    on_gpus: bool = False

    def is_in(self, version: str) -> bool:
        """Return whether a version has it."""
        return numbers(self.first) <= numbers(version) and not (self.fixed and numbers(self.fixed) <= numbers(version))

    @property
    def fix(self) -> str:
        """Return the fix, as a sentence."""
        newer = f"pip install 'deepspeed>={self.fixed}', or " if self.fixed else ""
        return f"{newer}{self.instead}."


def _accumulates(config: Config) -> bool:
    return bool(config.get("gradient_accumulation_steps", 1) > 1)


def _overlaps(config: Config) -> bool:
    return stage(config) in (1, 2) and is_on(config, ZERO, "overlap_comm")


def _has_muon(config: Config) -> bool:
    return str(lookup(config, ("optimizer", "type"))).lower() == "muon"


def _quantizes_weights(config: Config) -> bool:
    keys = ("zero_quantized_weights", "zero_quantized_nontrainable_weights")
    return stage(config) == 3 and any(is_on(config, ZERO, key) for key in keys)


GUARDS: tuple[Guard, ...] = (
    Guard(
        *("0.15.2", "0.19.0", "wrong"),
        (ZERO, "offload_optimizer"),
        lambda config: (
            stage(config) in (1, 2) and device(config, "offload_optimizer") != "none" and _accumulates(config)
        ),
        "ZeRO 1 and 2 with an offloaded optimizer lose the gradients of all but one micro-batch of a step",
        Key("accumulative_counts", 1),
        "DeepSpeed#7967, #7981; brought in by #6550",
    ),
    Guard(
        *("0.18.6", "0.19.0", "wrong"),
        ("data_types", "grad_accum_dtype"),
        lambda config: (
            (stage(config), computes_in(config), accumulates_in(config)) == (1, "bf16", "fp32") and _accumulates(config)
        ),
        "ZeRO 1 in bf16 with fp32 sums leaves the last micro-batch of a step out of the average over ranks",
        "remove data_types.grad_accum_dtype",
        "DeepSpeed#7985, which names 0.18.6 and later",
    ),
    Guard(
        *("0", "0.19.0", "wrong"),
        (ZERO, "overlap_comm"),
        _overlaps,
        "overlap_comm at ZeRO 1 and 2 frees gradient buffers while they are still being sent",
        "set overlap_comm to false",
        "DeepSpeed#7965",
        on_gpus=True,
    ),
    Guard(
        *("0", "0.19.3", "wrong"),
        (ZERO, "overlap_comm"),
        _overlaps,
        "overlap_comm at ZeRO 1 and 2 reads gradient buckets while they are still being filled",
        "set overlap_comm to false",
        "DeepSpeed#8061, #8080; the release is as its source says",
        on_gpus=True,
    ),
    Guard(
        *("0", "0.19.4", "wrong"),
        (ZERO, "stage3_use_all_reduce_for_fetch_params"),
        lambda config: stage(config) == 3 and is_on(config, ZERO, "stage3_use_all_reduce_for_fetch_params"),
        "stage3_use_all_reduce_for_fetch_params adds uninitialized memory to padded weights",
        "set it to false",
        "DeepSpeed#8158; the release is as its source says",
    ),
    Guard(
        *("0", "0.19.5", "wrong"),
        (ZERO, "zero_hpz_partition_size"),
        lambda config: stage(config) == 3 and lookup(config, (ZERO, "zero_hpz_partition_size"), 1) > 1,
        "zero_hpz_partition_size pads small weights with uninitialized memory, or crashes on them",
        "remove it",
        "DeepSpeed#6659, #8210",
    ),
    Guard(
        *("0", "0.19.6", "wrong"),
        (ZERO, "zero_quantized_weights"),
        lambda config: _quantizes_weights(config) and computes_in(config) != "fp16",
        "zero_quantized_weights reads all weights as fp16, even in bf16",
        f"remove it, or {Key('dtype', 'fp16')}",
        "DeepSpeed#7775, #8215; the release is as its source says",
        on_gpus=True,
    ),
    Guard(
        *("0", "0.18.6", "wrong"),
        ("bf16", "enabled"),
        lambda config: stage(config) not in STEPPING and computes_in(config) == "bf16",
        "ZeRO stage 0 in bf16 divides gradients by a loss scale that was never applied, and never clears them",
        "use ZeRO stage 1",
        "DeepSpeed#7837, #7839",
    ),
    Guard(
        *("0.17.6", "0.18.3", "wrong"),
        (ZERO, "stage"),
        lambda config: stage(config) == 2,
        "ZeRO 2 computes wrong gradients, with a third of ZeRO 3's norm",
        "use ZeRO stage 3",
        "DeepSpeed#7718, open; trl#4540 has it as fixed in 0.18.3",
    ),
    Guard(
        *("0", "0.18.8", "wrong"),
        (ZERO, "stage"),
        lambda config: stage(config) == 3,
        "ZeRO 3 with torch 2.10 and later reduces gradients while they are still being computed",
        "use ZeRO stage 2",
        "DeepSpeed#7898; the release is as its source says",
        on_gpus=True,
    ),
    Guard(
        *("0.18.5", "0.18.7", "slow"),
        (ZERO, "stage"),
        lambda config: stage(config) in STEPPING,
        "ZeRO counts hooks again for every weight, which makes a step up to 2.5 times as slow",
        "use another version",
        "DeepSpeed#7885, #7886",
    ),
    Guard(
        *("0", "0.19.7", "fails"),
        ("optimizer", "type"),
        lambda config: _has_muon(config) and computes_in(config) == "fp16" and stage(config) in (1, 2),
        "Muon in fp16 at ZeRO 1 and 2 keeps the first overflow in its momentum and never updates a weight again",
        Key("dtype", "bf16"),
        "DeepSpeed#8432, #8435; the release is as its source says",
    ),
    Guard(
        *("0", "0.19.7", "wrong"),
        ("optimizer", "type"),
        lambda config: _has_muon(config) and stage(config) not in STEPPING,
        "Muon without ZeRO is SGD",
        "use ZeRO stage 1, 2 or 3",
        "DeepSpeed#8441; the release is as its source says",
    ),
    Guard(
        *("0", "0.19.8", "wrong"),
        ("data_types", "grad_accum_dtype"),
        lambda config: (
            _has_muon(config) and (stage(config), computes_in(config), accumulates_in(config)) == (1, "bf16", "fp32")
        ),
        "Muon at ZeRO 1 in bf16 with fp32 sums is SGD",
        "remove data_types.grad_accum_dtype",
        "DeepSpeed#8442, #8526; the release is as its source says",
    ),
)


def is_known_of(keys: tuple[str, ...], version: str) -> bool:
    """Return whether a version has a known bug that a key triggers."""
    return any(guard.keys == keys for guard in of_version(version))


def of_version(version: str) -> Iterator[Guard]:
    """Yield the bugs of a version of DeepSpeed, with any config."""
    yield from (guard for guard in GUARDS if guard.is_in(version))


def met(config: Config, version: str, *, has_gpus: bool) -> Iterator[Guard]:
    """Yield the bugs that a final config triggers in a version of DeepSpeed."""
    yield from (guard for guard in of_version(version) if guard.holds(config) and (has_gpus or not guard.on_gpus))
