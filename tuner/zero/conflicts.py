"""Rules over several keys of a DeepSpeed config: what contradicts, crashes later, or has no effect.

It assumes keys and types were checked, and only reads; what it drops is dropped aloud.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from tuner.errors import DeepSpeedConfigError, did_you_mean
from tuner.zero.fields import Field, schema
from tuner.zero.findings import Findings, lookup, named, show
from tuner.zero.jsonfile import Keys

CheckBlock = Callable[[dict[str, Any], Keys, Field, Findings, str], dict[str, Any]]
Config = dict[str, Any]

_ZERO = "zero_optimization"
_STEPPING = (1, 2, 3)


class Rule(NamedTuple):
    """A contradiction: where it is told, when it holds, what is wrong, and what to do."""

    keys: tuple[str, ...]
    holds: Callable[[Config], bool]
    what: str
    fix: str


def stage(config: Config) -> int:
    """Return the ZeRO stage as DeepSpeed will see it."""
    found = lookup(config, (_ZERO, "stage"), 0)
    return found if isinstance(found, int) else 0


def _true(config: Config, *keys: str) -> bool:
    return lookup(config, keys) is True


def _device(config: Config, block: str) -> str:
    return str(lookup(config, (_ZERO, block, "device"), "none"))


def _no_path(block: str) -> Callable[[Config], bool]:
    return lambda config: _device(config, block) == "nvme" and not lookup(config, (_ZERO, block, "nvme_path"))


def _zenflow(config: Config, key: str, default: Any = "auto") -> Any:
    return lookup(config, (_ZERO, "zenflow", key), default)


def _has_zenflow(config: Config) -> bool:
    return isinstance(lookup(config, (_ZERO, "zenflow")), dict)


def _sums(config: Config) -> bool:
    return str(config.get("gradient_allreduce_op")).lower() == "sum"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


RULES: tuple[Rule, ...] = (
    Rule(
        ("bf16", "enabled"),
        lambda config: _true(config, "fp16", "enabled") and _true(config, "bf16", "enabled"),
        "fp16.enabled and bf16.enabled are both true",
        "Keep one of the two.",
    ),
    Rule(
        (_ZERO, "offload_optimizer", "device"),
        _no_path("offload_optimizer"),
        'offload_optimizer.device is "nvme" without nvme_path',
        "Add nvme_path, a folder on the NVMe disk.",
    ),
    Rule(
        (_ZERO, "offload_param", "device"),
        _no_path("offload_param"),
        'offload_param.device is "nvme" without nvme_path',
        "Add nvme_path, a folder on the NVMe disk.",
    ),
    Rule(
        (_ZERO, "offload_optimizer", "ratio"),
        lambda config: stage(config) != 3 and lookup(config, (_ZERO, "offload_optimizer", "ratio"), 1) < 1,
        "offload_optimizer.ratio below 1 needs ZeRO stage 3",
        "Remove ratio or set stage to 3.",
    ),
    Rule(
        (_ZERO, "offload_optimizer", "super_offload"),
        lambda config: stage(config) != 3 and _true(config, _ZERO, "offload_optimizer", "super_offload"),
        "offload_optimizer.super_offload needs ZeRO stage 3",
        "Remove super_offload or set stage to 3.",
    ),
    Rule(
        (_ZERO, "compute_grad_norm"),
        lambda config: lookup(config, (_ZERO, "compute_grad_norm")) is False and stage(config) not in (1, 2),
        "compute_grad_norm = false needs ZeRO stage 1 or 2",
        "Remove compute_grad_norm.",
    ),
    Rule(
        (_ZERO, "zenflow", "select_interval"),
        lambda config: _zenflow(config, "select_strategy") == "auto" and _whole(_zenflow(config, "select_interval")),
        'zenflow.select_interval is a number, but select_strategy "auto" sets it by itself',
        'Remove select_interval or set select_strategy to "step".',
    ),
    Rule(
        (_ZERO, "zenflow"),
        lambda config: (
            _zenflow(config, "select_strategy") in ("step", "epoch") and not _whole(_zenflow(config, "select_interval"))
        ),
        'zenflow.select_strategy "step" and "epoch" need a number as select_interval',
        "Set select_interval.",
    ),
    Rule(
        (_ZERO, "zenflow", "select_interval"),
        lambda config: (
            _zenflow(config, "select_strategy") == "step"
            and _whole(_zenflow(config, "update_interval"))
            and _whole(_zenflow(config, "select_interval"))
            and _zenflow(config, "select_interval") < _zenflow(config, "update_interval")
        ),
        "zenflow.select_interval is smaller than update_interval",
        "Make select_interval at least update_interval.",
    ),
    Rule(
        (_ZERO, "zenflow", "steps_per_epoch"),
        lambda config: _zenflow(config, "steps_per_epoch", None) is not None,
        "zenflow.steps_per_epoch is set by DeepSpeed itself",
        "Remove it.",
    ),
    Rule(
        ("gradient_allreduce_op",),
        lambda config: _sums(config) and stage(config) == 3,
        'gradient_allreduce_op = "sum" does not work with ZeRO stage 3',
        'Write "mean".',
    ),
    Rule(
        ("gradient_allreduce_op",),
        lambda config: _sums(config) and (_has_zenflow(config) or _true(config, "compile", "deepcompile")),
        'gradient_allreduce_op = "sum" does not work with zenflow or compile.deepcompile',
        'Write "mean".',
    ),
    Rule(
        ("fp16", "fp16_master_weights_and_grads"),
        lambda config: _true(config, "fp16", "fp16_master_weights_and_grads") and stage(config) not in _STEPPING,
        "fp16.fp16_master_weights_and_grads needs ZeRO stage 1, 2 or 3",
        "Set zero_optimization.stage.",
    ),
    Rule(
        ("bf16", "bf16_master_weights_and_grads"),
        lambda config: _true(config, "bf16", "bf16_master_weights_and_grads") and stage(config) not in _STEPPING,
        "bf16.bf16_master_weights_and_grads needs ZeRO stage 1, 2 or 3",
        "Set zero_optimization.stage.",
    ),
    Rule(
        ("bf16", "bf16_optimizer_states"),
        lambda config: (
            _true(config, "bf16", "bf16_optimizer_states")
            and not (_true(config, "bf16", "bf16_master_weights_and_grads") and stage(config) in _STEPPING)
        ),
        "bf16.bf16_optimizer_states needs bf16.bf16_master_weights_and_grads and ZeRO stage 1, 2 or 3",
        "Set both, or remove bf16_optimizer_states.",
    ),
    Rule(
        ("checkpoint", "writer"),
        lambda config: lookup(config, ("checkpoint", "writer")) is not None,
        "checkpoint.writer works only under the deepspeed launcher: it crashes at the first checkpoint here",
        "Remove it.",
    ),
)


def check_rules(config: Config, findings: Findings) -> None:
    """Report every rule that `config` breaks, and drop offloading that has no effect at its stage."""
    if any(keys == (_ZERO, "stage") for keys, *_ in findings.problems):
        # Without a stage, half of the rules would accuse keys that are right.
        return
    _drop_inert_offload(config, findings)
    for rule in RULES:
        if rule.holds(config):
            findings.problem(rule.keys, rule.what, rule.fix)
    if _device(config, "offload_optimizer") == "nvme" and stage(config) in (1, 2):
        keys = (_ZERO, "offload_optimizer", "device")
        findings.warn(keys, f'{named(keys, "nvme")} means "cpu" below stage 3', "Set stage to 3 to use the disk.")


def _drop_inert_offload(config: Config, findings: Findings) -> None:
    for block, first in (("offload_param", 3), ("offload_optimizer", 1)):
        if stage(config) < first and _device(config, block) != "none":
            what = f"zero_optimization.{block} has no effect at stage {stage(config)} and was dropped"
            findings.warn((_ZERO, block), what, f"It works from stage {first} on.")
            del config[_ZERO][block]


_ONE_BIT = {"onebitadam", "zerooneadam", "onebitlamb", "onebitsgd"}


def check_optimizer(config: Config, findings: Findings, check_block: CheckBlock) -> None:
    """Check the type of the optimizer and the names and types of its params."""
    if not isinstance(config.get("optimizer"), dict):
        return
    name, params = config["optimizer"].get("type"), config["optimizer"].get("params")
    if not isinstance(name, str):
        findings.problem(("optimizer",), "optimizer has no type; DeepSpeed would silently ignore it", "Add its type.")
        return
    own, torch = schema()["optimizers"], schema()["torch_optimizers"]
    if name.lower() not in own and name not in torch:
        findings.problem(("optimizer", "type"), *_unknown_optimizer(name, own, torch))
        return
    known = own.get(name.lower()) if name.lower() in own else torch[name]
    if isinstance(params, dict):
        config["optimizer"]["params"] = _params(params, known, findings, check_block)


def _unknown_optimizer(name: str, own: dict[str, Any], torch: dict[str, Any]) -> tuple[str, str]:
    if name.lower() in _ONE_BIT:
        return f"DeepSpeed's 1-bit optimizers were removed; there is no {name!r}", 'Write "AdamW".'
    spelt = {choice.lower() for choice in torch}
    names = [*torch, *(choice for choice in own if choice not in spelt)]
    return f"there is no optimizer {name!r}", did_you_mean(name, names) or f"Write one of {', '.join(names)}."


def _params(params: Config, known: list[str] | None, findings: Findings, check_block: CheckBlock) -> Config:
    at = ("optimizer", "params")
    if "max_grad_norm" in params:
        what = "max_grad_norm is no param of DeepSpeed's optimizers"
        findings.problem((*at, "max_grad_norm"), what, "Use gradient_clipping.")
        params = {key: value for key, value in params.items() if key != "max_grad_norm"}
    typed = schema()["optimizer_params"]
    anything = {"type": ["int", "float", "bool", "str", "list", "object", "null"]}
    names = known if known is not None else list(params)
    fields = {key: typed.get(key, anything) for key in names}
    return check_block(params, at, {"keys": fields, "parsed": "legacy"}, findings, "optimizer.params.")


def check_scheduler(config: Config, findings: Findings, check_block: CheckBlock) -> None:
    """Check the type of the scheduler and its params."""
    if not isinstance(config.get("scheduler"), dict):
        return
    name, params = config["scheduler"].get("type"), config["scheduler"].get("params")
    known = schema()["schedulers"]
    if name is None:
        findings.problem(("scheduler",), "scheduler has no type; DeepSpeed would silently ignore it", "Add its type.")
    elif name not in known:
        fix = (
            did_you_mean(str(name), known) or f"Write one of {', '.join(known)}; the recipe's param_scheduler has more."
        )
        findings.problem(("scheduler", "type"), f"DeepSpeed has no scheduler {show(name)}", fix)
    elif isinstance(params, dict):
        field = {"keys": known[name]["keys"], "parsed": "legacy"}
        config["scheduler"]["params"] = check_block(
            params, ("scheduler", "params"), field, findings, "scheduler.params."
        )
    for key in known.get(name, {}).get("required", ()) if isinstance(name, str) else ():
        if not isinstance(params, dict) or key not in params:
            findings.problem(("scheduler", "params"), f"scheduler {name} needs params.{key}", f'Add "{key}": "auto".')


# Features whose kernels exist for NVIDIA GPUs alone; DeepSpeed fails on each in the middle of its start.
CUDA_ONLY: tuple[tuple[str, ...], ...] = (
    (_ZERO, "offload_optimizer", "super_offload"),
    (_ZERO, "zero_quantized_weights"),
    (_ZERO, "zero_quantized_gradients"),
    (_ZERO, "zero_quantized_nontrainable_weights"),
    ("aio", "use_gds"),
)


def check_device(value: Config, device: Literal["cuda", "cpu"], where: Callable[[Keys], str]) -> None:
    """Check a config against the device it will run on.

    Args:
        value: A config that `check` returned.
        where: Returns the place of a key, such as `Document.where`.

    Raises:
        DeepSpeedConfigError: a feature of NVIDIA GPUs is on without one.
    """
    for keys in CUDA_ONLY:
        if device != "cuda" and lookup(value, keys) is True:
            what = f"{named(keys, True)} needs an NVIDIA GPU, and this run is on a {device.upper()}"
            raise DeepSpeedConfigError(what, where=where(keys), fix="Remove it or set it to false.")
