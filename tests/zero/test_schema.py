from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import deepspeed
from deepspeed.runtime import config as deepspeed_config

from tests.zero import deepspeed_schema
from tuner.zero.config_schema import AUTO, BOUNDS, schema
from tuner.zero.contradictions import OBSOLETE
from tuner.zero.lint import is_off


def _paths(fields: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in fields.items():
        yield f"{prefix}{name}", field
        yield from _paths(field.get("keys", {}), f"{prefix}{name}.")


def _known_paths() -> set[str]:
    params = {f"optimizer.params.{name}" for name in schema()["optimizer_params"]}
    steps = {f"scheduler.params.{key}" for entry in schema()["schedulers"].values() for key in entry["keys"]}
    return {path for path, _ in _paths(schema()["keys"])} | params | steps


def test_the_schema_is_what_the_installed_deepspeed_says() -> None:
    written = deepspeed_schema.TARGET.read_text(encoding="utf-8")

    assert written == deepspeed_schema.render(deepspeed_schema.build()), "python -m tests.zero.deepspeed_schema --write"


def test_every_type_that_reading_cannot_tell_is_still_a_key_of_deepspeed() -> None:
    paths = {path for path, _ in _paths(schema()["keys"])}
    free = {
        "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics",
        "data_efficiency.data_sampling.dynamic_batching.max_batch_size",
    }
    # A pydantic field goes by its name there and by its alias in the file.
    assert set(deepspeed_schema._LATER) - free <= paths


def test_the_key_that_is_read_outside_of_the_parser_is_still_read() -> None:
    assert '"sequence_parallel_size" in config' in inspect.getsource(deepspeed_config.DeepSpeedConfig)


def test_every_pydantic_block_drops_autos_and_refuses_unknown_keys() -> None:
    for model in deepspeed_schema._PYDANTIC.values():
        assert model.model_config["extra"] == "forbid"


def test_each_rule_is_about_a_key_that_exists() -> None:
    assert _known_paths() >= AUTO
    assert _known_paths() >= set(BOUNDS)


def test_each_key_that_deepspeed_rejects_has_a_replacement_told() -> None:
    rejected = {(key,) for key in schema()["rejected"][""]}
    rejected |= {("zero_optimization", key) for key in schema()["rejected"]["zero_optimization"]}

    assert rejected <= {keys for keys, entry in OBSOLETE.items() if entry.kind == "removed"}


def test_no_key_that_never_did_anything_is_one_of_deepspeed() -> None:
    live = {path for path, field in _paths(schema()["keys"]) if "deprecated" not in field}

    assert not {".".join(keys) for keys in OBSOLETE} & live


def test_defaults_fit_their_own_fields() -> None:
    for path, field in _paths(schema()["keys"]):
        if field.get("default") is not None and field.get("enum"):
            assert field["default"] in field["enum"], path


def test_a_feature_is_off_when_nothing_in_it_is_on() -> None:
    for off in (False, None, 0, "", {}, [], {"enabled": False, "block": 16}, {"inner": {"enabled": False, "x": 1}}):
        assert is_off(off), off
    for on in (True, 1, "auto", {"enabled": True}, {"mode": "fixed"}, {"inner": {"enabled": True}}):
        assert not is_off(on), on


def test_the_schema_is_made_for_the_version_it_names() -> None:
    assert schema()["deepspeed"] == deepspeed.__version__.split("+")[0]
    assert json.loads(json.dumps(schema())) == schema()
