"""Whether a DeepSpeed config means what its author wants: every key, type, value and contradiction, without DeepSpeed.

It changes no value beyond cleaning. `merge` adds what a recipe and the machine decide.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from tuner.errors import DeepSpeedConfigError, did_you_mean, nearest, together
from tuner.optimizers import REMOVED
from tuner.recipes.merging import lookup
from tuner.zero.config import ZERO, Config, Document, Keys, device, stage
from tuner.zero.config_schema import Field, Misfit, converted, kinds, named, schema, show, spellings
from tuner.zero.contradictions import DROPPED, INERT, OBSOLETE, RULES, UNRUNNABLE

Entries = list[tuple[Keys, DeepSpeedConfigError]]
"""Keys, each with its problem or warning. A warning is an error object that is not raised."""
_MAX_UNKNOWN = 20
"""Unknown keys that are reported one by one: each is compared with all known ones, in a millisecond."""


@dataclasses.dataclass
class Findings:
    """Problems and warnings of one document, collected so that a user sees all of them at once."""

    document: Document
    _warnings: Entries = dataclasses.field(default_factory=list)
    _problems: Entries = dataclasses.field(default_factory=list)
    _unknown: list[Keys] = dataclasses.field(default_factory=list)

    def warn(self, keys: Keys, message: str, fix: str | None = None) -> None:
        """Add a warning about the key at `keys`."""
        self._warnings.append((keys, DeepSpeedConfigError(message, where=self.document.where(keys), fix=fix)))

    def problem(self, keys: Keys, message: str, fix: str | None = None) -> None:
        """Add a problem with the key at `keys`."""
        error = DeepSpeedConfigError(message, where=self.document.where(keys), fix=fix or "Remove it.")
        self._problems.append((keys, error))

    def unknown(self, keys: Keys, fields: dict[str, Field]) -> None:
        """Add the problem that the block at `keys` has no such key; `fields` are those that it has."""
        self._unknown.append(keys)
        if len(self._unknown) <= _MAX_UNKNOWN:
            self.problem(keys, *_unknown(keys, fields))

    def has_problem_at(self, keys: Keys) -> bool:
        """Return whether a problem is with this very key."""
        return any(keys == at for at, _ in self._problems)

    @property
    def warnings(self) -> list[DeepSpeedConfigError]:
        """The warnings, in the order of the file."""
        return self._in_order([*(((), note) for note in self.document.notes), *self._warnings])

    @property
    def problems(self) -> list[DeepSpeedConfigError]:
        """The problems, in the order of the file; many unknown keys end with how many more there are."""
        problems = [*self._problems]
        if more := self._unknown[_MAX_UNKNOWN:]:
            problem = f"unknown keys from here on: {len(more):,} more"
            fix = "Remove them. Is it a DeepSpeed config?"
            error = DeepSpeedConfigError(problem, where=self.document.where(more[0]), fix=fix)
            problems.append((more[0], error))
        return self._in_order(problems)

    def _in_order(self, entries: Entries) -> list[DeepSpeedConfigError]:
        placed = [(self.document.place(keys), error) for keys, error in entries]
        return [error for _, error in sorted(placed, key=lambda pair: (pair[0].line or 0, pair[0].column or 0))]


class Checked(NamedTuple):
    """A config that DeepSpeed reads as its author wants.

    Attributes:
        value: A copy of the document's value: 5e8 is an int where DeepSpeed wants one, obsolete and inert keys are
            gone, other spellings of a key are replaced by its main one, and "auto" stands only where Hugging Face
            resolves it.
        warnings: Dropped keys and what replaces them, each with its place.
    """

    value: Config
    warnings: tuple[str, ...] = ()


def check(document: Document) -> Checked:
    """Check a whole config; the relation of the three batch sizes is `merge`'s.

    Raises:
        DeepSpeedConfigError: one or more problems, all in one error: an unknown key, a wrong type or value, a
            removed feature that is on, an "auto" that nothing resolves, keys that contradict each other.
    """
    checked, findings = inspect(document)
    if problems := findings.problems:
        raise together(problems)
    return checked


def inspect(document: Document, *, to_run: bool = False) -> tuple[Checked, Findings]:
    """Check a whole config without raising; use the value only if the findings hold no problem.

    `to_run`: a feature that no run of tuner survives is a problem, not a warning.
    """
    findings = Findings(document)
    value = copy.deepcopy(document.value)
    _drop_comments(value, findings)
    _drop_obsolete(value, findings)
    cleaned = _block(value, (), {"keys": schema()["keys"], "parsed": "legacy"}, findings)
    _check_optimizer(cleaned, findings)
    _check_scheduler(cleaned, findings)
    _check_rules(cleaned, findings, to_run=to_run)
    return Checked(cleaned, tuple(warning.message for warning in findings.warnings)), findings


def _block(block: Config, keys: Keys, field: Field, findings: Findings, path: str = "") -> Config:
    """Return the block cleaned; problems go to `findings`, and their keys are left out.

    Args:
        keys: The block's key as written, for its place in the file.
        path: Its key in the main spelling, for the rules; ends with a dot unless empty.
    """
    if "keys" not in field:
        return block
    known_as = spellings(field["keys"])
    result: Config = {}
    for written, value in block.items():
        at = (*keys, written)
        name = known_as.get(written)
        if name is None:
            findings.unknown(at, field["keys"])
        elif name in result:
            findings.problem(at, f"{written} is another spelling of {name}, and both are set", "Keep one of the two.")
        else:
            if field["keys"].get(written, {}).get("deprecated"):
                findings.warn(at, f"{written} is deprecated in DeepSpeed", f"Use {name}.")
            field_of_name = field["keys"][name]
            _entry(result, name, f"{path}{name}", value, at, field_of_name, field["parsed"], findings)
    return result


def _entry(
    result: Config, name: str, path: str, value: object, at: Keys, field: Field, parsed: str, findings: Findings
) -> None:
    if isinstance(value, dict) and "object" in kinds(field):
        result[name] = _block(value, at, field, findings, f"{path}.")
        return
    try:
        result[name] = converted(value, field, path, parsed)
    except Misfit as misfit:
        fix = _as_block(at, field) if isinstance(value, bool | int) and "keys" in field else misfit.fix
        findings.problem(at, f"{named(at, value)} {misfit.problem}", fix)


def _as_block(at: Keys, field: Field) -> str:
    example = '"stage": 2' if "stage" in field["keys"] else '"enabled": true'
    return f'Write "{at[-1]}": {{{example}}}.' if "enabled" in field["keys"] or "stage" in field["keys"] else ""


def _unknown(at: Keys, fields: dict[str, Field]) -> tuple[str, str]:
    name, block = str(at[-1]), ".".join(map(str, at[:-1]))
    problem = f"there is no key {name!r}{f' in {block}' if block else ''}"
    problem += "" if block else "; DeepSpeed would silently ignore it"
    home = _homes(schema()["keys"]).get(name)
    if not nearest(name, fields) and home:
        return problem, f"It belongs into {home}."
    return problem, did_you_mean(name, fields) or "Remove it."


def _homes(fields: dict[str, Field], path: str = "") -> dict[str, str]:
    """Return the block of each key that belongs to one block only."""
    homes: dict[str, str] = {}
    for name, field in fields.items():
        for key in field.get("keys", {}):
            homes[key] = "" if key in homes else f"{path}{name}"
        homes |= _homes(field.get("keys", {}), f"{path}{name}.")
    return {key: home for key, home in homes.items() if home}


# --- Contradictions, and features without effect ---


def _check_rules(config: Config, findings: Findings, *, to_run: bool) -> None:
    """Report every contradiction in `config`, and drop offloading that has no effect at its stage."""
    if findings.has_problem_at((ZERO, "stage")):
        # Without a stage, half of the rules would accuse keys that are right.
        return
    _drop_inert_offload(config, findings)
    for rule in RULES:
        if rule.holds(config):
            findings.problem(rule.keys, rule.problem, rule.fix)
    if device(config, "offload_optimizer") == "nvme" and stage(config) in (1, 2):
        keys = (ZERO, "offload_optimizer", "device")
        findings.warn(keys, f'{named(keys, "nvme")} means "cpu" below stage 3', "Set stage to 3 to use the disk.")
    for rule in UNRUNNABLE:
        if rule.holds(config) and to_run:
            findings.problem(rule.keys, rule.problem, rule.fix)
        elif rule.holds(config):
            findings.warn(rule.keys, f"{rule.problem}: a run with it does not start", rule.fix)
    for path, (reason, fix) in (INERT | DROPPED).items():
        if not is_off(lookup(config, path)):
            dropped = " and was dropped" if path in DROPPED else ""
            findings.warn(path, f"{'.'.join(path)} has no effect here{dropped}: {reason}", fix)
            if dropped:
                del lookup(config, path[:-1])[path[-1]]


def _drop_inert_offload(config: Config, findings: Findings) -> None:
    for block, first in (("offload_param", 3), ("offload_optimizer", 1)):
        if stage(config) < first and device(config, block) != "none":
            message = f"zero_optimization.{block} has no effect at stage {stage(config)} and was dropped"
            findings.warn((ZERO, block), message, f"It needs stage {first} or higher.")
            del config[ZERO][block]


def _check_optimizer(config: Config, findings: Findings) -> None:
    """Check the type of the optimizer and the names and types of its params."""
    if not isinstance(config.get("optimizer"), dict):
        return
    name, params = config["optimizer"].get("type"), config["optimizer"].get("params")
    if not isinstance(name, str):
        findings.problem(("optimizer",), "optimizer has no type; DeepSpeed would silently ignore it", "Add its type.")
        return
    deepspeed_optimizers, torch = schema()["optimizers"], schema()["torch_optimizers"]
    if name.lower() not in deepspeed_optimizers and name not in torch:
        findings.problem(("optimizer", "type"), *_unknown_optimizer(name, deepspeed_optimizers, torch))
        return
    known_params = deepspeed_optimizers.get(name.lower()) if name.lower() in deepspeed_optimizers else torch[name]
    if isinstance(params, dict):
        config["optimizer"]["params"] = _params(params, known_params, findings)


def _unknown_optimizer(name: str, deepspeed_names: Collection[str], torch: Collection[str]) -> tuple[str, str]:
    if name.lower() in REMOVED:
        return f"DeepSpeed's 1-bit optimizers were removed; there is no {name!r}", 'Write "AdamW".'
    spelt = {choice.lower() for choice in torch}
    names = [*torch, *(choice for choice in deepspeed_names if choice not in spelt)]
    return f"there is no optimizer {name!r}", did_you_mean(name, names) or f"Use one of {', '.join(names)}."


def _params(params: Config, known_params: list[str] | None, findings: Findings) -> Config:
    at = ("optimizer", "params")
    if "max_grad_norm" in params:
        problem = "max_grad_norm is not a parameter of DeepSpeed's optimizers"
        findings.problem((*at, "max_grad_norm"), problem, "Use gradient_clipping.")
        params = {key: value for key, value in params.items() if key != "max_grad_norm"}
    typed = schema()["optimizer_params"]
    anything = {"type": "int | float | bool | str | list | object | null"}
    names = known_params if known_params is not None else list(params)
    fields = {key: typed.get(key, anything) for key in names}
    return _block(params, at, {"keys": fields, "parsed": "legacy"}, findings, "optimizer.params.")


def _check_scheduler(config: Config, findings: Findings) -> None:
    """Check the type of the scheduler and its params."""
    if not isinstance(config.get("scheduler"), dict):
        return
    name, params = config["scheduler"].get("type"), config["scheduler"].get("params")
    schedulers = schema()["schedulers"]
    if name is None:
        findings.problem(("scheduler",), "scheduler has no type; DeepSpeed would silently ignore it", "Add its type.")
    elif name not in schedulers:
        fix = (
            did_you_mean(str(name), schedulers)
            or f"Use one of {', '.join(schedulers)}; the recipe's param_scheduler has more."
        )
        findings.problem(("scheduler", "type"), f"DeepSpeed has no scheduler {show(name)}", fix)
    elif isinstance(params, dict):
        field = {"keys": schedulers[name]["keys"], "parsed": "legacy"}
        config["scheduler"]["params"] = _block(params, ("scheduler", "params"), field, findings, "scheduler.params.")
    for key in schedulers.get(name, {}).get("required", ()) if isinstance(name, str) else ():
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
    """Check that a config can run on a device and a number of ranks.

    Args:
        value: A config that `check` returned.
        device: DeepSpeed's and torch's name of it: 'cuda', 'cpu', 'npu', ...
        where: Returns the place of a key, such as `Document.where`.

    Raises:
        DeepSpeedConfigError: a feature of NVIDIA GPUs is on without one; or a feature that no run of tuner survives, or
            that does not work on this number of ranks.
    """
    for rule in UNRUNNABLE:
        if rule.holds(value):
            raise DeepSpeedConfigError(rule.problem, where=where(rule.keys), fix=rule.fix)
    group = lookup(value, _GROUP, 1)
    if stage(value) == 3 and ranks % min(group, ranks) != 0:
        problem = f"{named(_GROUP, group)} does not divide the number of ranks, {ranks}"
        raise DeepSpeedConfigError(problem, where=where(_GROUP), fix="Use the number of GPUs of a node.")
    for keys in CUDA_ONLY:
        if device != "cuda" and lookup(value, keys) is True:
            problem = f"{named(keys, True)} needs an NVIDIA GPU, and this run is on a {device.upper()}"
            raise DeepSpeedConfigError(problem, where=where(keys), fix="Remove it or set it to false.")


# --- Keys that older guides show and DeepSpeed 0.19.8 refuses or never read ---


def is_off(setting: object, off: tuple[object, ...] = ()) -> bool:
    """Return whether a setting switches its feature off: a false value, or a block not enabled anywhere."""
    if isinstance(setting, dict):
        return not setting["enabled"] if "enabled" in setting else all(is_off(item) for item in setting.values())
    return not setting or setting in off


_COMMENT = ("_", "//", "#")


def _drop_comments(value: Config, findings: Findings) -> None:
    """Remove keys that are comments, such as `_comment` in some tools' configs, with one warning for all."""
    comments = list(_comments(value))
    if not comments:
        return
    for keys in comments:
        lookup(value, keys[:-1]).pop(keys[-1], None)  # an alias of YAML is the same block in two places
    names = ", ".join(".".join(keys) for keys in comments)
    message = f"{names}: DeepSpeed ignores keys that begin with an underscore or a slash; dropped as a comment"
    findings.warn(comments[0], message, "A comment starts with //.")


def _comments(value: Config, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, inner in value.items():
        if key.startswith(_COMMENT):
            yield (*prefix, key)
        elif isinstance(inner, dict):
            yield from _comments(inner, (*prefix, key))


def _drop_obsolete(value: Config, findings: Findings) -> None:
    """Remove obsolete keys from `value`, each with a warning, or with a problem if it is switched on."""
    _zero_as_a_block(value, findings)
    for keys, obsolete in OBSOLETE.items():
        block = lookup(value, keys[:-1])
        if isinstance(block, dict) and keys[-1] in block:
            setting = block.pop(keys[-1])
            harmless = obsolete.kind == "inert" or is_off(setting, obsolete.off)
            report: Callable[..., None] = findings.warn if harmless else findings.problem
            dropped = "; it was dropped" if harmless else ""
            report(keys, f"{'.'.join(keys)} {obsolete.reason}{dropped}", obsolete.instead)


def _zero_as_a_block(value: Config, findings: Findings) -> None:
    """Replace the oldest form of the ZeRO block, a boolean, which DeepSpeed's first guide still shows."""
    setting = value.get("zero_optimization")
    if isinstance(setting, bool):
        number = int(setting)
        message = (
            f"{named(('zero_optimization',), setting)} is deprecated in DeepSpeed, which reads it as stage {number}"
        )
        findings.warn(("zero_optimization",), message, f'Write "zero_optimization": {{"stage": {number}}}.')
        value["zero_optimization"] = {"stage": number}
