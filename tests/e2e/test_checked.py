"""Two real ranks: whatever `tuner check` has nothing against, trains; configs are drawn from the whole schema."""

from __future__ import annotations

import copy
import json
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import ok, quick, train
from tests.launch.plans import made
from tuner.errors import TunerError
from tuner.launch import preflight
from tuner.machine import hardware
from tuner.zero.config_schema import BOUNDS, schema

pytestmark = [pytest.mark.e2e, pytest.mark.long]

_KEYS_OF_A_CONFIG = 10
_STAGES = (0, 1, 2, 3)
Leaf = tuple[tuple[str, ...], list[Any]]


def _values(field: dict[str, Any], path: str) -> list[Any]:
    """Return values of a field that a user might write, beside its default."""
    if field.get("enum"):
        return list(field["enum"])
    lowest = max(bounds.get("ge", bounds.get("gt", -1) + 1) for bounds in (field, BOUNDS.get(path, {})))
    numbers = {"int": [lowest, lowest + 1, 10**6], "float": [lowest, 0.5]}
    others = {"bool": [not field.get("default", False)], "str": ["reports"]}
    return [value for kind in field["type"] for value in (numbers | others).get(kind, [])]


def _leaves(fields: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    for name, field in fields.items():
        if field.get("keys"):
            yield from _leaves(field["keys"], (*path, name))
        elif values := _values(field, ".".join((*path, name))):
            yield (*path, name), values


def _with(config: dict[str, Any], keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return the config with one more value, in a block that is switched on where it has a switch."""
    result = copy.deepcopy(config)
    block, fields = result, schema()["keys"]
    for key in keys[:-1]:
        block, fields = block.setdefault(key, {}), fields[key]["keys"]
        if "enabled" in fields:
            block.setdefault("enabled", True)
    block[keys[-1]] = value
    return result


def _has_nothing_against(config: dict[str, Any], folder: Path) -> bool:
    path = folder / "drawn.json"
    path.write_text(json.dumps(config))
    environ = dict(os.environ)
    try:
        plan = made(
            recipe=str(quick(folder, "full")),
            hardware=hardware.detect(environ),
            environ=environ,
            flags={"nproc_per_node": 2},
            deepspeed=str(path),
        )
    except TunerError:
        return False
    return not any(isinstance(finding, TunerError) for finding in preflight.inspect(plan))


def _drawn(seed: int, stage: int, folder: Path) -> dict[str, Any]:
    """Return a config of keys from all over the schema, each taken where the check lets it pass beside the others."""
    chance = random.Random(seed)  # noqa: S311 (nothing secret is drawn)
    leaves = sorted(_leaves(schema()["keys"]))
    chance.shuffle(leaves)
    config: dict[str, Any] = {"zero_optimization": {"stage": stage}, "zero_force_ds_cpu_optimizer": False}
    added = 0
    for keys, values in leaves:
        larger = _with(config, keys, chance.choice(values))
        if larger["zero_optimization"]["stage"] == stage and _has_nothing_against(larger, folder):
            config, added = larger, added + 1
        if added == _KEYS_OF_A_CONFIG:
            break
    return config


@pytest.mark.parametrize("stage", _STAGES)
def test_a_config_that_the_check_lets_pass_trains(tmp_path: Path, stage: int) -> None:
    config = _drawn(100 + stage, stage, tmp_path)
    path = tmp_path / "my.json"
    path.write_text(json.dumps(config))

    run = ok(train(quick(tmp_path, "full"), tmp_path / "run", "--deepspeed", path, "--set", "max_steps=2"))

    assert len(run.losses) == 2, config
    assert all(map(math.isfinite, run.losses)), config
