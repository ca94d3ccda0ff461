"""The schema of DeepSpeed's config, and whether one value fits one field of it.

It is data generated from DeepSpeed plus tuner's own bounds; `contradictions` has the rules over several keys.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tuner.files import read_text

Field = dict[str, Any]
"""One field of schema.json."""


class Misfit(Exception):
    """A value does not fit its field; `problem` completes "`key = value` ..."."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.problem, self.fix = problem, fix


@functools.cache
def schema() -> Field:
    """Return the schema. `tests/zero/deepspeed_schema.py` writes it and explains its format."""
    return dict(json.loads(read_text(Path(__file__).with_name("schema.json"))))


def spellings(fields: Mapping[str, Field]) -> dict[str, str]:
    """Return every spelling of every key, each with its main spelling."""
    main = {name: name for name in fields}
    for name, field in fields.items():
        main |= dict.fromkeys(field.get("aliases", ()), name)
    for name, field in fields.items():
        if field.get("deprecated") in main:
            main[name] = main[field["deprecated"]]
    return main


@functools.cache
def known_keys() -> dict[str, Field]:
    """Return every key of DeepSpeed's config, in its main spelling and in others, by its dotted path."""
    return dict(_walk(schema()["keys"], ""))


def _walk(fields: Mapping[str, Field], prefix: str) -> Iterator[tuple[str, Field]]:
    for spelt, name in spellings(fields).items():
        if fields.get(spelt, {}).get("deprecated"):
            continue
        yield f"{prefix}{spelt}", fields[name]
        yield from _walk(fields[name].get("keys", {}), f"{prefix}{spelt}.")


# Where Hugging Face's Trainer or accelerate replaces "auto", and what `zero.merge` alone replaces: a buffer's size, and
# whether sending overlaps. Anywhere else DeepSpeed takes a default or fails.
AUTO = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps", "optimizer.params.weight_decay"),
    *("scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr"),
    *("scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps"),
    *("fp16.enabled", "bf16.enabled"),
    "zero_optimization.overlap_comm",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.offload_param.buffer_size",
}

# Bounds that DeepSpeed does not check, or only when it is too late.
_AT_LEAST_1 = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "sequence_parallel_size"),
    *("expert_parallel.autoep_size", "steps_per_print", "vocabulary_size", "flops_profiler.profile_step"),
    *(f"zero_optimization.{key}" for key in ("zero_hpz_partition_size", "zenflow.select_interval")),
    "zero_optimization.zenflow.update_interval",
    *(f"fp16.{key}" for key in ("loss_scale_window", "hysteresis", "min_loss_scale")),
    *(f"aio.{key}" for key in ("block_size", "queue_depth", "intra_op_parallelism")),
    *(f"scheduler.params.{key}" for key in ("warmup_num_steps", "total_num_steps", "lr_range_test_step_size")),
)
_AT_LEAST_0 = (
    *("gradient_clipping", "tensor_parallel.autotp_size", "zero_optimization.zenflow.full_warm_up_rounds"),
    *("fp16.loss_scale", "fp16.initial_scale_power"),
    *(f"optimizer.params.{key}" for key in ("lr", "eps", "weight_decay")),
)
BOUNDS: dict[str, Field] = {
    **{key: {"ge": 1} for key in _AT_LEAST_1},
    **{key: {"ge": 0} for key in _AT_LEAST_0},
    **{key: {"gt": 0} for key in ("gradient_predivide_factor", "zero_optimization.allgather_bucket_size")},
    "log_level": {"enum": ["debug", "info", "warning", "error", "critical"], "any_case": True},
}

_MAX_SHOWN = 60
_RELATIONS = {
    "gt": (operator.gt, "greater than"),
    "ge": (operator.ge, "at least"),
    "lt": (operator.lt, "less than"),
    "le": (operator.le, "at most"),
}
_NAMES = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "list": "a list",
    "object": "an object",
    "null": "null",
}


def converted(value: object, field: Field, path: str, parsed: str) -> object:
    """Return `value` in the type of the field: 5e8 becomes an int if the field takes one.

    Args:
        path: The full dotted key, for `AUTO` and `BOUNDS`.
        parsed: The way in which DeepSpeed reads the block around it, "pydantic" or "legacy".

    Raises:
        Misfit: a wrong type, an "auto" that nothing resolves, a value that is not allowed or out of bounds.
    """
    if value == "auto" and "auto" not in field.get("enum", ()):
        return _auto(field, path, parsed)
    value, field = _typed(value, field, parsed), field | BOUNDS.get(path, {})
    for item in value if isinstance(value, list) else [value]:
        # If the field takes strings too, the enum is about those: "auto" or a list of any names.
        if item is value or "str" not in kinds(field):
            _check_enum(item, field)
        _check_bounds(item, field)
    return value


def _auto(field: Field, path: str, parsed: str) -> str:
    if path in AUTO:
        return "auto"
    fix = f"Write {expected(field)}."
    if path == "zero_optimization.stage":
        raise Misfit("is read by DeepSpeed as 0, which means no ZeRO at all", fix)
    if parsed == "pydantic":
        raise Misfit(f"is silently read by DeepSpeed as its default, {show(field.get('default'))}", fix)
    raise Misfit("is read by DeepSpeed as a plain string, which fails later", fix)


def expected(field: Field) -> str:
    """Return a description of the values that the field takes."""
    if field.get("enum") and "list" not in kinds(field):
        return _one_of([*field["enum"], *([None] if "null" in kinds(field) else [])])
    return " or ".join(_NAMES[kind] for kind in kinds(field)) or "nothing: remove the key"


def kinds(field: Field) -> list[str]:
    """Return the types that the field takes, as `_NAMES` has them."""
    return [kind for kind in field["type"].split(" | ") if kind]


def _one_of(choices: list[object]) -> str:
    *head, last = [show(choice) for choice in choices]
    return f"{', '.join(head)} or {last}" if head else last


def _typed(value: object, field: Field, parsed: str) -> object:
    allowed = kinds(field)
    if isinstance(value, float) and not math.isfinite(value):
        raise Misfit("is not finite", f"Write {expected(field)}.")
    if isinstance(value, float) and "float" not in allowed and "int" in allowed and value.is_integer():
        return int(value)
    if _kind(value) in allowed or (_kind(value) == "int" and "float" in allowed):
        if isinstance(value, list | tuple) and "items" in field:
            return [_typed(item, {"type": field["items"]}, parsed) for item in value]
        return value
    unchecked = "; DeepSpeed does not check it" if parsed == "legacy" else ""
    raise Misfit(f"is not {expected(field)}{unchecked}", f"Write {expected(field)}.")


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names_of_types = ((bool, "bool"), (int, "int"), (float, "float"), (str, "str"), (list, "list"), (tuple, "list"))
    return next((name for kind, name in names_of_types if isinstance(value, kind)), "object")


def _check_enum(value: object, field: Field) -> None:
    choices = field.get("enum")
    if not choices or type(value) is not type(choices[0]):
        return
    same = value in choices
    if isinstance(value, str) and field.get("any_case"):
        same = value.lower() in [choice.lower() for choice in choices]
    if not same:
        raise Misfit(f"is not {_one_of(choices)}", f"Write {_one_of(choices)}.")


def _check_bounds(value: object, bounds: Field) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    for name, (holds, words) in _RELATIONS.items():
        if name in bounds and not holds(value, bounds[name]):
            raise Misfit(f"is not {words} {show(bounds[name])}", f"Write a number {words} {show(bounds[name])}.")


def show(value: object) -> str:
    """Return a value as JSON, cut to fit into a message."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def named(keys: tuple[str | int, ...], value: object) -> str:
    """Return `a.b = value` for a message."""
    return f"{'.'.join(map(str, keys))} = {show(value)}"
