"""Writes `tuner/zero/schema.json` from the installed DeepSpeed: `python -m tests.zero.deepspeed_schema --write`.

It holds no rule of tuner's own; those are tables in `tuner/zero`.

The file is one object:

    deepspeed   the version it was made from
    keys        name -> field, the top level of a config
    rejected    {"": {key: DeepSpeed's message}, "zero_optimization": {...}}: keys whose mere presence is refused
    optimizers  DeepSpeed's own types, in lower case because it does not care -> names of their params, or null
                where the params are another package's
    torch_optimizers  classes of torch.optim, spelt exactly -> names of their params
    optimizer_params  name -> field, for the params that every optimizer reads the same way
    schedulers  type -> {"keys": name -> field, "required": names}

A field is an object of:

    type        "int", "float", "bool", "str", "list", "object", "null", or several: "int | null"; empty: nothing from
                JSON is accepted
    default     what DeepSpeed takes without it; absent where that is null or no JSON
    enum        the values allowed; of a list, the items allowed, unless the field takes a string too: then the strings
    any_case    true where case does not matter in an enum
    gt ge lt le  bounds of a number
    items       type of a list's items
    aliases     other spellings of the key
    deprecated  the key that DeepSpeed maps it to
    keys        the fields of a block; a block without it takes any key
    parsed      "pydantic": DeepSpeed checks the block, drops "auto" and turns strings into numbers;
                "legacy": it reads the keys it knows and checks nothing

Pydantic blocks come from their models. Legacy blocks come from a dict that notes each key asked of it and the default
that goes with the question. Where that default is None, or a value is checked later, `_LATER` says what is meant.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import inspect
import json
import logging
import types
import typing
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import deepspeed
import torch
from deepspeed.module_inject.auto_ep_config import AutoEPConfig, parse_autoep_config
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime import config, engine, lr_schedules, precision_config
from deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.data_pipeline.config import get_data_efficiency_config
from deepspeed.runtime.model_checkpointing import config as checkpoint_config
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config

TARGET = Path(__file__).parents[2] / "tuner" / "zero" / "schema.json"

Field = dict[str, Any]

_PYDANTIC: dict[str, type[DeepSpeedConfigModel]] = {
    "zero_optimization": config.get_zero_config({}).__class__,
    "fp16": precision_config.DeepSpeedFP16Config,
    "bf16": precision_config.DeepSpeedBF16Config,
    "hybrid_engine": config.HybridEngineConfig,
    "compile": config.CompileConfig,
    "weight_quantization": config.WeightQuantConfig,
    "tensor_parallel": config.get_tensor_parallel_config({}).__class__,
    "comms_logger": deepspeed.comm.config.CommsLoggerConfig,
    "tensorboard": deepspeed.monitor.config.TensorBoardConfig,
    "wandb": deepspeed.monitor.config.WandbConfig,
    "csv_monitor": deepspeed.monitor.config.CSVConfig,
    "comet": deepspeed.monitor.config.CometConfig,
}

_DTYPES = sorted(name for name in config.DtypeEnum._value2member_map_ if isinstance(name, str))
_COMMUNICATION = {"type": ["str", "null"], "enum": ["fp16", "bf16", "fp32"], "any_case": True}
_WARMUP_TYPES = sorted([lr_schedules.WARMUP_LOG_RATE, lr_schedules.WARMUP_LINEAR_RATE])
_NUMBER_OR_LIST = {"type": ["float", "list"], "items": ["float"]}

# What reading cannot tell: keys whose default is None, and values that are checked elsewhere. By full path.
_LATER: dict[str, Field] = {
    "train_batch_size": {"type": ["int"]},
    "train_micro_batch_size_per_gpu": {"type": ["int"]},
    "gradient_accumulation_steps": {"type": ["int"]},
    "steps_per_print": {"type": ["int", "null"]},
    "vocabulary_size": {"type": ["int", "null"]},
    "gradient_clipping": {"type": ["float"]},
    "sequence_parallel_size": {"type": ["int"]},
    "communication_data_type": _COMMUNICATION,
    "seq_parallel_communication_data_type": _COMMUNICATION,
    "gradient_allreduce_op": {"enum": list(config.GRADIENT_ALLREDUCE_OP_SUPPORTED), "any_case": True},
    "log_level": {"type": ["str", "null"]},
    "datastates_ckpt": {"type": ["object", "bool", "null"]},
    "autotuning": {"type": ["object"], "parsed": "legacy"},
    "optimizer.legacy_fusion": {"type": ["bool"], "default": False},
    "optimizer.type": {"type": ["str"]},
    "optimizer.params": {"type": ["object"], "parsed": "legacy"},
    "scheduler.type": {"type": ["str"]},
    "scheduler.params": {"type": ["object"], "parsed": "legacy"},
    "torch_autocast.dtype": {"type": ["str"], "enum": _DTYPES},
    "torch_autocast.lower_precision_safe_modules": {"type": ["list"], "items": ["str"]},
    "activation_checkpointing.number_checkpoints": {"type": ["int", "null"]},
    "flops_profiler.output_file": {"type": ["str", "null"]},
    "checkpoint.tag_validation": {
        "enum": list(config.CHECKPOINT_TAG_VALIDATION_MODES),
        "any_case": True,
    },
    "checkpoint.writer": {"type": ["object", "null"]},
    "data_types.grad_accum_dtype": {"type": ["str", "null"], "enum": _DTYPES},
    "data_types.param_dtype": {"type": ["str", "null"], "enum": _DTYPES},
    "data_types.buffer_dtype": {"type": ["str", "null"], "enum": _DTYPES},
    "data_types.keep_in_fp32_modules": {"type": ["str", "list"], "enum": ["auto"], "items": ["str"]},
    "pipeline.stages": {"type": ["str", "int"], "enum": ["auto"]},
    "zero_optimization.zenflow.select_strategy": {"enum": ["auto", "step", "epoch"]},
    "zero_optimization.zenflow.select_interval": {"enum": ["auto"]},
    "zero_optimization.zenflow.update_interval": {"enum": ["auto"]},
    "expert_parallel.expert_w3": {"type": ["str", "null"]},
    "expert_parallel.load_balance_coeff": {"type": ["null"]},
    "expert_parallel.routed_scaling_factor": {"enum": ["auto"]},
    "expert_parallel.top_k": {"enum": ["auto"]},
    "tensor_parallel.injection_policy_tuple": {"items": ["str"]},
    "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics": {"type": ["object"]},
    "data_efficiency.data_sampling.dynamic_batching.max_batch_size": {"type": ["int"]},
    "data_efficiency.data_routing.random_ltd": {"type": ["object"]},
}
# Params that every optimizer reads the same way; a signature has no types.
PARAM_TYPES: dict[str, Field] = {
    "lr": {"type": ["float"]},
    "muon_lr": {"type": ["float"]},
    "adam_lr": {"type": ["float"]},
    "eps": {"type": ["float", "list"]},
    "weight_decay": {"type": ["float"]},
    "momentum": {"type": ["float"]},
    "betas": {"type": ["list"], "items": ["float"]},
}


class _Asked(dict[str, Any]):
    """A dict that notes the keys asked of it, with the default that goes with the question."""

    def __init__(self, content: dict[str, Any], asked: dict[str, Any]) -> None:
        super().__init__(content)
        self.asked = asked

    def get(self, key: str, default: Any = None) -> Any:
        self.asked[key] = default if self.asked.get(key) is None else self.asked[key]
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.setdefault(key, None)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.setdefault(str(key), None)
        return super().__contains__(key)

    def __copy__(self) -> _Asked:
        return _Asked(dict(self), self.asked)

    def keys(self) -> Any:
        return _Names(self)


class _Names:
    """`name in block.keys()` is a question too."""

    def __init__(self, block: _Asked) -> None:
        self.block = block

    def __contains__(self, key: object) -> bool:
        return key in self.block

    def __iter__(self) -> Any:
        return iter(dict(self.block))

    def __len__(self) -> int:
        return len(self.block)


def build() -> dict[str, Any]:
    """Return the schema of the installed DeepSpeed."""
    schema: dict[str, Any] = {
        "deepspeed": deepspeed.__version__.split("+")[0],
        "keys": _top_level(),
        "rejected": {
            "": dict(sorted(config._REMOVED_TOP_LEVEL_CONFIG_KEYS.items())),
            "zero_optimization": dict(sorted(config._REMOVED_ZERO_CONFIG_KEYS.items())),
        },
        "optimizers": _optimizers(),
        "torch_optimizers": _torch_optimizers(),
        "optimizer_params": PARAM_TYPES,
        "schedulers": {name: _scheduler(name) for name in sorted(lr_schedules.VALID_LR_SCHEDULES)},
    }
    return _with_types_as_text(schema)


def _with_types_as_text(value: Any) -> Any:
    """Return fields with ["int", "null"] as "int | null"."""
    if not isinstance(value, dict):
        return value
    return {
        key: " | ".join(dict.fromkeys(inner))
        if key in ("type", "items") and isinstance(inner, list)
        else _with_types_as_text(inner)
        for key, inner in value.items()
    }


def render(schema: dict[str, Any]) -> str:
    """Return the text of the file."""
    return json.dumps(schema, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def top_level_keys() -> dict[str, Any]:
    """Return the top-level keys that `DeepSpeedConfig` asks for, with their defaults, without the rejected ones."""
    asked: dict[str, Any] = {}
    config.DeepSpeedConfig(_Asked({"train_batch_size": 1}, asked))
    rejected = config._REMOVED_TOP_LEVEL_CONFIG_KEYS
    return {key: default for key, default in asked.items() if key not in rejected and key not in _ELSEWHERE}


# Asked for by code that shares the dict: an alias, and names one level further down.
_ELSEWHERE = {"bfloat16", "data_sampling", "data_routing"}


def _top_level() -> dict[str, Field]:
    legacy = _legacy_blocks()
    fields: dict[str, Field] = {}
    for key, default in top_level_keys().items():
        if key in _PYDANTIC:
            fields[key] = {"type": ["object"], "parsed": "pydantic", "keys": _model(_PYDANTIC[key], key)}
        else:
            fields[key] = legacy.get(key) or _legacy_field(key, default)
    fields["bf16"]["aliases"] = ["bfloat16"]
    # Looked up in the raw config, and only where a process group is up.
    fields["sequence_parallel_size"] = _LATER["sequence_parallel_size"]
    return fields


def _legacy_blocks() -> dict[str, Field]:
    return {
        "activation_checkpointing": _block("activation_checkpointing", DeepSpeedActivationCheckpointingConfig),
        "flops_profiler": _block("flops_profiler", config.DeepSpeedFlopsProfilerConfig),
        "aio": _block("aio", get_aio_config, null=True),
        "data_types": _block("data_types", _whole),
        "torch_autocast": _block("torch_autocast", _whole, {"dtype": "bf16", "lower_precision_safe_modules": []}),
        "optimizer": _block("optimizer", _whole, {"type": "adam", "params": {}}),
        "scheduler": _block("scheduler", _whole, {"type": "WarmupLR", "params": {}}),
        "checkpoint": _checkpoint(),
        "pipeline": _constants("pipeline", config.get_pipeline_config({})),
        "timers": _timers(),
        "expert_parallel": _expert_parallel(),
        "data_efficiency": _data_efficiency(),
    }


def _whole(param_dict: dict[str, Any]) -> None:
    config.DeepSpeedConfig({"train_batch_size": 1, **param_dict})


def _block(path: str, reader: Callable[[Any], Any], content: Field | None = None, null: bool = False) -> Field:
    asked: dict[str, Any] = {}
    reader({path: _Asked(content or {}, asked)})
    return _constants(path, asked, null)


def _constants(path: str, defaults: dict[str, Any], null: bool = False) -> Field:
    keys = {key: _legacy_field(f"{path}.{key}", default) for key, default in defaults.items()}
    return {"type": ["object", "null"] if null else ["object"], "parsed": "legacy", "keys": keys}


def _checkpoint() -> Field:
    asked: dict[str, Any] = {}
    write: dict[str, Any] = {}
    block = _Asked({"parallel_write": _Asked({}, write)}, asked)
    _whole({"checkpoint": block})
    checkpoint_config.get_checkpoint_config({"checkpoint": block})
    result = _constants("checkpoint", {key: value for key, value in asked.items() if key != "parallel_write"})
    result["keys"]["parallel_write"] = _constants("checkpoint.parallel_write", write)
    return result


def _timers() -> Field:
    throughput = {
        "type": ["object"],
        "parsed": "pydantic",
        "keys": _model(type(config.get_timers_config({})), "timers.throughput"),
    }
    return {"type": ["object"], "parsed": "legacy", "keys": {"throughput": throughput}}


def _expert_parallel() -> Field:
    asked: dict[str, Any] = {"enabled": False}
    parse_autoep_config(_Asked({"enabled": False}, asked))
    known = {item.name: item for item in dataclasses.fields(AutoEPConfig)}
    hints = typing.get_type_hints(AutoEPConfig)
    keys = {}
    for key in asked:
        item = known[key]
        default = {"default": item.default} if _is_json(item.default) else {}
        path = f"expert_parallel.{key}"
        keys[key] = _annotation(hints[key], path) | default | _LATER.get(path, {})
    return {"type": ["object"], "parsed": "legacy", "keys": keys}


def _data_efficiency() -> Field:
    """Return the block two levels deep; below, each metric and schedule has keys of its own."""
    names = ("data_sampling", "data_routing")
    asked: dict[str, dict[str, Any]] = {name: {} for name in ("", *names, "curriculum_learning")}
    inner = {name: _Asked({}, asked[name]) for name in names}
    get_data_efficiency_config({"data_efficiency": _Asked(inner, asked[""])})
    outer = {key: default for key, default in asked[""].items() if key not in names}
    block = _constants("data_efficiency", outer)
    for name in names:
        scalars = {key: default for key, default in asked[name].items() if isinstance(default, bool | int)}
        field = _constants(f"data_efficiency.{name}", scalars)
        free = [key for key in asked[name] if key not in scalars]
        field["keys"] |= {key: {"type": ["object"], "parsed": "legacy"} for key in free}
        block["keys"][name] = field
    return block


def _legacy_field(path: str, default: Any) -> Field:
    later = _LATER.get(path, {})
    field = later if "type" in later else {"type": [_json_type(default, path)]} | later
    field = dict(field)
    if _is_json(default):
        field["default"] = default
    return field


def _json_type(default: Any, path: str) -> str:
    for kind, name in ((bool, "bool"), (int, "int"), (float, "float"), (str, "str"), (list, "list"), (dict, "object")):
        if isinstance(default, kind):
            return name
    raise TypeError(f"{path}: its default {default!r} does not tell its type; add it to _LATER")


def _model(model: type[DeepSpeedConfigModel], path: str) -> dict[str, Field]:
    fields = {}
    hints = typing.get_type_hints(model)
    for name, info in model.model_fields.items():
        field = _annotation(hints[name], f"{path}.{name}") | _bounds(info.metadata)
        default = info.get_default(call_default_factory=True)
        if isinstance(default, enum.Enum):
            default = default.value
        if "keys" not in field and _is_json(default):
            field["default"] = default
        extra = info.json_schema_extra or {}
        if extra.get("deprecated"):
            field["deprecated"] = extra.get("new_param", "")
        if info.alias:
            field["aliases"] = [name]
        fields[info.alias or name] = field | _LATER.get(f"{path}.{name}", {})
    return fields


def _annotation(hint: Any, path: str) -> Field:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        parts = [_annotation(argument, path) for argument in arguments]
        merged: Field = {}
        for part in parts:
            merged |= part
        return merged | {"type": [kind for part in parts for kind in part["type"]]}
    if origin is typing.Literal:
        return {"type": ["str"], "enum": list(arguments)}
    if origin is list:
        inner = _annotation(arguments[0], path)
        return {"type": ["list"], "items": inner["type"]} | ({"enum": inner["enum"]} if "enum" in inner else {})
    return _plain(hint, path)


def _plain(hint: Any, path: str) -> Field:
    if isinstance(hint, type) and issubclass(hint, DeepSpeedConfigModel):
        return {"type": ["object"], "parsed": "pydantic", "keys": _model(hint, path)}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        values = list(dict.fromkeys(member.value for member in hint))
        return {"type": ["int" if isinstance(values[0], int) else "str"], "enum": values}
    known = {bool: "bool", int: "int", float: "float", str: "str", type(None): "null", list: "list", tuple: "list"}
    if hint in known:
        return {"type": [known[hint]]}
    if isinstance(hint, type) and issubclass(hint, PurePath):
        return {"type": ["str"]}
    if hint in (dict, typing.Dict) or typing.get_origin(hint) is dict:  # noqa: UP006
        return {"type": ["object"]}
    return {"type": [] if hint is torch.dtype else ["object", "str", "null"]}


def _bounds(metadata: list[Any]) -> Field:
    names = ("gt", "ge", "lt", "le")
    return {name: getattr(item, name) for item in metadata for name in names if getattr(item, name, None) is not None}


def _is_json(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | list)


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    skipped = {"self", "params", "model_params", "optimizer", "args", "kwargs", "param_groups", "last_batch_iteration"}
    found = inspect.signature(function).parameters
    return {name: parameter for name, parameter in found.items() if name not in skipped}


def _optimizers() -> dict[str, Any]:
    extra = {"adam_w_mode", "torch_adam", "fp32_optimizer_states"}
    # DeepSpeed itself passes adamw_mode: given twice it is a TypeError.
    adam = {*_parameters(FusedAdam), *_parameters(DeepSpeedCPUAdam), *_parameters(torch.optim.AdamW), *extra} - {
        "adamw_mode"
    }
    by_type: dict[str, set[str] | None] = {
        "adam": adam,
        "adamw": adam,
        "adagrad": {*_parameters(torch.optim.Adagrad), *_parameters(DeepSpeedCPUAdagrad)},
        "lamb": {*_parameters(FusedLamb)},
        "lion": {*_parameters(FusedLion), *_parameters(DeepSpeedCPULion)},
        "muon": {*_MUON, *extra},
        # Of the package mup, which is not installed.
        "muadam": None,
        "muadamw": None,
        "musgd": None,
    }
    if set(by_type) != set(config.DEEPSPEED_OPTIMIZERS):
        raise TypeError("DeepSpeed's optimizers changed; tell their params here")
    result = {name: sorted(names) if names else None for name, names in by_type.items()}
    return result


def _torch_optimizers() -> dict[str, list[str]]:
    """Return the classes that take a step without a closure, which DeepSpeed never passes."""
    classes = {name: value for name, value in vars(torch.optim).items() if inspect.isclass(value)}
    kept = sorted(set(classes) - {"Optimizer", "LBFGS"})
    return {name: sorted(_parameters(classes[name])) for name in kept}


_MUON = {*engine.DeepSpeedEngine._MUON_HALF_KEYS, *engine.DeepSpeedEngine._ADAM_HALF_KEYS, "muon_lr", "adam_lr"}


def _scheduler(name: str) -> dict[str, Any]:
    parameters = _parameters(getattr(lr_schedules, name).__init__)
    keys = {key: _parameter(key, parameter) for key, parameter in parameters.items()}
    required = [key for key, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
    return {"keys": keys, "required": required}


def _parameter(key: str, parameter: inspect.Parameter) -> Field:
    if key == "warmup_type":
        return {"type": ["str"], "enum": _WARMUP_TYPES, "default": parameter.default}
    whole = key.endswith(("_steps", "_size", "_count"))
    default = None if parameter.default is inspect.Parameter.empty else parameter.default
    if isinstance(default, bool):
        return {"type": ["bool"], "default": default}
    field: Field = {"type": ["int"]} if whole else dict(_NUMBER_OR_LIST)
    if default is None and parameter.default is None:
        field["type"] = [*field["type"], "null"]
    return field | ({"default": default} if default is not None else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite tuner/zero/schema.json")
    logging.disable(logging.INFO)
    text = render(build())
    if parser.parse_args().write:
        TARGET.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
