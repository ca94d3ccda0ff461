"""What contradicts, crashes later, or has no effect in a DeepSpeed config, told with its place.

It assumes keys and types were checked, and only reads; what it drops is dropped aloud.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tuner.errors import DeepSpeedConfigError, did_you_mean
from tuner.recipes.merging import lookup
from tuner.zero.config_schema import Field, schema
from tuner.zero.findings import Findings
from tuner.zero.jsonfile import Keys, named, show
from tuner.zero.rules import RULES, ZERO, Config, device, is_off, stage
from tuner.zero.unrunnable import DROPPED, INERT, UNRUNNABLE

CheckBlock = Callable[[dict[str, Any], Keys, Field, Findings, str], dict[str, Any]]


def check_rules(config: Config, findings: Findings, *, to_run: bool) -> None:
    """Report every rule that `config` breaks, and drop offloading that has no effect at its stage."""
    if findings.has_problem_at((ZERO, "stage")):
        # Without a stage, half of the rules would accuse keys that are right.
        return
    _drop_inert_offload(config, findings)
    _drop_inert(config, findings)
    for rule in RULES:
        if rule.holds(config):
            findings.problem(rule.keys, rule.what, rule.fix)
    if device(config, "offload_optimizer") == "nvme" and stage(config) in (1, 2):
        keys = (ZERO, "offload_optimizer", "device")
        findings.warn(keys, f'{named(keys, "nvme")} means "cpu" below stage 3', "Set stage to 3 to use the disk.")
    for rule in UNRUNNABLE:
        if rule.holds(config) and to_run:
            findings.problem(rule.keys, rule.what, rule.fix)
        elif rule.holds(config):
            findings.warn(rule.keys, f"{rule.what}: a run with it does not start", rule.fix)
    for path, (why, fix) in INERT.items():
        if not is_off(lookup(config, path)):
            findings.warn(path, f"{'.'.join(path)} has no effect here: {why}", fix)


def _drop_inert_offload(config: Config, findings: Findings) -> None:
    for block, first in (("offload_param", 3), ("offload_optimizer", 1)):
        if stage(config) < first and device(config, block) != "none":
            what = f"zero_optimization.{block} has no effect at stage {stage(config)} and was dropped"
            findings.warn((ZERO, block), what, f"It needs stage {first} or higher.")
            del config[ZERO][block]


def _drop_inert(config: Config, findings: Findings) -> None:
    for path, (why, fix) in DROPPED.items():
        if not is_off(lookup(config, path)):
            findings.warn(path, f"{'.'.join(path)} has no effect here and was dropped: {why}", fix)
            del lookup(config, path[:-1])[path[-1]]


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
    return f"there is no optimizer {name!r}", did_you_mean(name, names) or f"Use one of {', '.join(names)}."


def _params(params: Config, known: list[str] | None, findings: Findings, check_block: CheckBlock) -> Config:
    at = ("optimizer", "params")
    if "max_grad_norm" in params:
        what = "max_grad_norm is not a parameter of DeepSpeed's optimizers"
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
        fix = did_you_mean(str(name), known) or f"Use one of {', '.join(known)}; the recipe's param_scheduler has more."
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
    (ZERO, "offload_optimizer", "super_offload"),
    (ZERO, "zero_quantized_weights"),
    (ZERO, "zero_quantized_gradients"),
    (ZERO, "zero_quantized_nontrainable_weights"),
    ("aio", "use_gds"),
    ("hybrid_engine", "enabled"),
)
_GROUP = (ZERO, "zero_hpz_partition_size")


def check_device(value: Config, device: str, where: Callable[[Keys], str], *, ranks: int = 1) -> None:
    """Check a config that is to be run, on which device, and on how many ranks.

    Args:
        value: A config that `check` returned.
        device: As torch and DeepSpeed call it: 'cuda', 'cpu', 'npu', ...
        where: Returns the place of a key, such as `Document.where`.

    Raises:
        DeepSpeedConfigError: a feature of NVIDIA GPUs is on without one, or one that no run of tuner survives, or none
            on so many ranks.
    """
    for rule in UNRUNNABLE:
        if rule.holds(value):
            raise DeepSpeedConfigError(rule.what, where=where(rule.keys), fix=rule.fix)
    group = lookup(value, _GROUP, 1)
    if stage(value) == 3 and ranks % min(group, ranks) != 0:
        what = f"{named(_GROUP, group)} does not divide the number of ranks, {ranks}"
        raise DeepSpeedConfigError(what, where=where(_GROUP), fix="Use the number of GPUs of a node.")
    for keys in CUDA_ONLY:
        if device != "cuda" and lookup(value, keys) is True:
            what = f"{named(keys, True)} needs an NVIDIA GPU, and this run is on a {device.upper()}"
            raise DeepSpeedConfigError(what, where=where(keys), fix="Remove it or set it to false.")
