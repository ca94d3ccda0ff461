from __future__ import annotations

import copy
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime import config as deepspeed_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner.errors import DeepSpeedConfigError
from tuner.recipes import loading
from tuner.recipes.merging import nested
from tuner.recipes.recipe import Overrides
from tuner.zero.choice import open_chosen
from tuner.zero.config import Document
from tuner.zero.config_schema import AUTO, kinds, schema
from tuner.zero.jsonfile import parse, read_json_config
from tuner.zero.lint import CUDA_ONLY, check, check_device

DATA = Path(__file__).parent / "data"
SHIPPED = Path(__file__).parents[2] / "tuner" / "deepspeed_presets"
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def _zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def _checked(value: dict[str, Any]) -> dict[str, Any]:
    return check(Document(value, "my.json")).value


def _refusal(value: dict[str, Any]) -> str:
    with pytest.raises(DeepSpeedConfigError) as caught:
        check(Document(value, "my.json"))
    return str(caught.value)


def _without_auto(value: Any, path: str = "") -> Any:
    if not isinstance(value, dict):
        return value
    kept = {key: item for key, item in value.items() if not (item == "auto" and f"{path}{key}" in AUTO)}
    return {key: _without_auto(item, f"{path}{key}.") for key, item in kept.items()}


def _deepspeed_reads(value: dict[str, Any]) -> deepspeed_config.DeepSpeedConfig:
    """Give a config to DeepSpeed itself: one rank, since no process group is up."""
    config = {key: item for key, item in _without_auto(value).items() if key not in _BATCH}
    return deepspeed_config.DeepSpeedConfig(copy.deepcopy(config) | {"train_micro_batch_size_per_gpu": 1})


@pytest.mark.parametrize("name", sorted(path.stem for path in SHIPPED.glob("*.json")))
def test_a_shipped_preset_is_accepted_without_a_warning(name: str) -> None:
    checked = check(open_chosen(loading.load("tiny_full_sample_e1", Overrides(nvme="/swap")), name))

    assert checked.warnings == ()
    _deepspeed_reads(checked.value)


def test_the_sample_of_the_guides_is_accepted_and_each_obsolete_key_named_with_its_line() -> None:
    path = DATA / "guide_ds_config.json"

    checked = check(read_json_config(path))

    lines = path.read_text(encoding="utf-8").splitlines()
    dropped = [
        "zero_optimization.offload_param",
        "zero_optimization.stage3_max_act_size",
        "sparse_attention",
        "activation_checkpointing.enabled",
        "pipeline.micro_batch_size",
        "seed",
    ]
    assert [warning.split()[1] for warning in checked.warnings] == dropped
    for name, warning in zip(dropped, checked.warnings, strict=True):
        line = int(warning.split(f"{path}:")[1].split(":")[0])
        assert f'"{name.split(".")[-1]}"' in lines[line - 1]
    _deepspeed_reads(checked.value)


def test_whole_floats_become_integers_where_an_integer_is_meant() -> None:
    value = _zero(reduce_bucket_size=5e8, sub_group_size=1e9) | {"steps_per_print": 10.0, "gradient_clipping": 1}

    checked = _checked(value)

    assert repr(checked["zero_optimization"]["reduce_bucket_size"]) == "500000000"
    assert repr(checked["steps_per_print"]) == "10"
    assert repr(checked["gradient_clipping"]) == "1"


def test_a_number_that_is_not_finite_is_refused() -> None:
    assert "is not finite" in _refusal({"gradient_clipping": float("inf")})


def test_a_list_of_names_beside_auto_is_any_names() -> None:
    for value in ("auto", [], ["rotary_emb"]):
        document = {"data_types": {"keep_in_fp32_modules": value}}

        assert _checked(document) == document
        _deepspeed_reads(document)


def test_every_spelling_of_a_key_becomes_its_main_one() -> None:
    value = _zero(stage=3, prefetch_bucket_size=5, stage3_gather_fp16_weights_on_model_save=True)

    checked = check(Document(value | {"bfloat16": {"enabled": "auto"}}, "my.json"))

    zero = {"stage": 3, "stage3_prefetch_bucket_size": 5, "stage3_gather_16bit_weights_on_model_save": True}
    assert checked.value == {"zero_optimization": zero, "bf16": {"enabled": "auto"}}
    assert len(checked.warnings) == 1
    assert "stage3_gather_16bit_weights_on_model_save" in checked.warnings[0]


@pytest.mark.parametrize("path", sorted(AUTO))
def test_auto_stays_where_hugging_face_resolves_it(path: str) -> None:
    *parents, last = path.split(".")
    types = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupDecayLR"}}
    value: dict[str, Any] = {last: "auto"}
    if parents[1:] == ["params"]:
        value = types[parents[0]] | {"params": {"total_num_steps": 9} | value if "sched" in path else value}
        parents = parents[:1]
    document = nested(tuple(parents), value) if parents else value

    assert _checked(document) == document


@pytest.mark.parametrize("name", sorted(schema()["rejected"][""]))
def test_a_rejected_block_is_dropped_aloud_when_off_and_refused_when_on(name: str) -> None:
    off = check(Document({name: {"enabled": False}}, "my.json"))

    assert off.value == {}
    assert len(off.warnings) == 1
    assert off.warnings[0].startswith(f"my.json: {name} was removed")
    assert name in _refusal({name: {"enabled": True}})


@pytest.mark.parametrize("key", ["mics_hierarchical_params_gather", "zeropp_loco_param", "cpu_offload"])
@pytest.mark.parametrize("off", [False, None])
def test_a_rejected_zero_key_is_dropped_aloud_when_off(key: str, off: Any) -> None:
    checked = check(Document(_zero(stage=1, **{key: off}), "my.json"))

    assert checked.value == _zero(stage=1)
    assert len(checked.warnings) == 1


def test_comments_as_keys_are_dropped_with_one_warning_that_names_them() -> None:
    value = {"_comment": "mine", "//": 1, **_zero(stage=2, _why="fits")}

    checked = check(Document(value, "my.json"))

    assert checked.value == _zero(stage=2)
    (warning,) = checked.warnings
    assert "_comment, //, zero_optimization._why" in warning


def test_mics_is_off_at_its_old_default() -> None:
    assert _checked(_zero(stage=3, mics_shard_size=-1)) == _zero(stage=3)


_THEIR_ERRORS = (AssertionError, AttributeError, TypeError, ValueError, deepspeed_config.DeepSpeedConfigError)

DEEPSPEED_REFUSES: list[dict[str, Any]] = [
    *({key: {"enabled": True}} for key in schema()["rejected"][""]),
    *(_zero(**{key: 8}) for key in schema()["rejected"]["zero_optimization"]),
    _zero(stage3_max_act_siz=1),
    _zero(stage=4),
    _zero(stage=2.5),
    _zero(stage=None),
    _zero(reduce_bucket_size=0),
    _zero(reduce_bucket_size="5e8"),
    _zero(reduce_bucket_size=[1]),
    _zero(offload_optimizer={"device": "gpu"}),
    _zero(offload_optimizer={"ratio": 2}),
    _zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
    _zero(stage=3, compute_grad_norm=False),
    _zero(zenflow={"topk_ratio": 1}),
    _zero(zenflow={"select_strategy": "batch"}),
    _zero(zenflow={"update_interval": 0}),
    _zero(zenflow={"select_interval": "often"}),
    _zero(leaf_module=[]),
    _zero(stage=3) | {"gradient_allreduce_op": "sum"},
    _zero(stage=2, zenflow={}) | {"gradient_allreduce_op": "sum"},
    {"gradient_allreduce_op": "max"},
    {"zero_optimization": None},
    {"bf16": True},
    {"bf16": {"loss_scale": 0}},
    {"bf16": {"bf16_optimizer_states": True}},
    {"bf16": {"bf16_master_weights_and_grads": True}},
    {"fp16": {"fp16_master_weights_and_grads": True}},
    {"fp16": {"loss_scale": -1}},
    {"fp16": {"enabled": True, "loss_scale_window": 0}},
    {"fp16": {"enabled": True, "min_loss_scale": 0}},
    {"fp16": {"min_loss_scale": True}},
    {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
    {"communication_data_type": "fp8"},
    {"optimizer": None},
    {"scheduler": None},
    {"torch_autocast": {"dtype": "fp8"}},
    {"data_types": {"keep_in_fp32_modules": "all"}},
    {"data_types": {"keep_in_fp32_modules": ["a", 3]}},
    {"checkpoint": {"tag_validation": "never"}},
    {"checkpoint": {"parallel_write": {"pipeline_stage": "yes"}}},
    {"checkpoint": {"writer": {"type": "slow"}}},
    {"compile": {"mode": "max-autotune"}},
    {"compile": {"passes": ["z9"]}},
    {"tensor_parallel": {"dtype": "bf16"}},
    {"tensor_parallel": {"autotp": 2}},
    {"tensorboard": {"path": "x"}},
    {"comet": {"samples_log_interval": "often"}},
    {"hybrid_engine": {"max_out_tokens": 0}},
    {"weight_quantization": {"q_type": "odd"}},
    {"timers": {"throughput": {"on": True}}},
    {"expert_parallel": {"load_balance_coeff": 0.1}},
]


@pytest.mark.parametrize("value", DEEPSPEED_REFUSES, ids=json.dumps)
def test_what_deepspeed_refuses_is_refused_before(value: dict[str, Any]) -> None:
    with pytest.raises(_THEIR_ERRORS):
        _deepspeed_reads(value)

    assert _refusal(value)


def _plausible(field: dict[str, Any]) -> st.SearchStrategy[Any]:
    by_kind: dict[str, st.SearchStrategy[Any]] = {
        "int": st.sampled_from([-1, 0, 1, 2, 5e8, 2.5, "3"]),
        "float": st.sampled_from([-1, 0, 0.5, 1, 2, 1e9]),
        "bool": st.booleans() | st.sampled_from([0, "yes"]),
        "str": st.sampled_from([*field.get("enum", ["name"]), "odd", "auto"]),
        "list": st.sampled_from([[], ["a"], field.get("enum", [0.5]), "a"]),
        "object": _block(field["keys"]) if "keys" in field else st.just({}),
        "null": st.none(),
    }
    return st.one_of([by_kind[kind] for kind in kinds(field)] or [st.just("fp16")]) | st.just(None)


def _block(fields: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    def chosen(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries({name: _plausible(fields[name]) for name in names})

    return st.lists(st.sampled_from(sorted(fields)), unique=True, max_size=3).flatmap(chosen)


def _accepted(value: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return _checked(value)
    except DeepSpeedConfigError:
        return None


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(
    _block({key: field for key, field in schema()["keys"].items() if key not in (*_BATCH, "optimizer", "scheduler")})
)
def test_whatever_we_accept_deepspeed_accepts(value: dict[str, Any]) -> None:
    checked = _accepted(value)

    # GDS asserts an NVIDIA GPU while the config is read; check_device tells that.
    if checked is not None and not (checked.get("aio") or {}).get("use_gds"):
        _deepspeed_reads(checked)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("auto"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(sorted(schema()["keys"])), _json, max_size=4))
def test_any_value_at_a_known_key_is_checked_or_refused(value: dict[str, Any]) -> None:
    _accepted(value)


@settings(max_examples=40)
@given(_json, _json, st.sampled_from(["AdamW", "muadam", "SGD", "x"]), st.sampled_from(["WarmupLR", "OneCycle", "x"]))
def test_any_optimizer_and_scheduler_is_checked_or_refused(
    first: Any, second: Any, optimizer: str, scheduler: str
) -> None:
    _accepted({"optimizer": {"type": optimizer, "params": first}, "scheduler": {"type": scheduler, "params": second}})
    _accepted(
        {"optimizer": {"type": first, "params": {"lr": second}}, "scheduler": {"type": second, "params": {"lr": first}}}
    )


def test_a_dot_in_the_name_of_a_param_is_part_of_the_name() -> None:
    document = {"optimizer": {"type": "MuAdam", "params": {"a.b": 1}}}

    assert _checked(document) == document


def test_all_problems_are_told_at_once_in_the_order_of_the_file() -> None:
    text = '{\n "gradient_cliping": 1,\n "bf16": {"enabled": 1},\n "amp": {"enabled": true}\n}'

    with pytest.raises(DeepSpeedConfigError) as caught:
        check(parse(text, "my_ds.json"))

    assert caught.value.where == "my_ds.json:2:2"
    first, second, third = str(caught.value).splitlines()
    assert first.startswith("bad-deepspeed-config: my_ds.json:2:2: there is no key 'gradient_cliping'")
    assert "my_ds.json:3:11: " in second
    assert "my_ds.json:4:2: " in third


def test_many_unknown_keys_end_with_how_many_more_there_are() -> None:
    unknown = {f"zero_optimizatio_{number}": 1 for number in range(5000)}
    started = time.process_time()

    with pytest.raises(DeepSpeedConfigError) as caught:
        check(Document({**unknown, "zero_optimization": {"stag": 2}, "steps_per_print": -1}, "my.json"))

    whole = [*caught.value.each()]
    assert sum("there is no key" in error.what for error in whole) == 20
    assert [error.what for error in whole if "more" in error.what] == ["unknown keys from here on: 4,981 more"]
    assert any("steps_per_print" in error.what for error in whole), "what else is wrong is told too"
    assert time.process_time() - started < 1


def test_offloading_that_has_no_effect_is_dropped_aloud_and_none_silently_kept() -> None:
    cpu, none = {"device": "cpu"}, {"device": "none"}

    loud = check(Document(_zero(stage=0, offload_param=cpu, offload_optimizer=cpu), "my.json"))
    silent = check(Document(_zero(stage=2, offload_param=none), "my.json"))

    assert loud.value == _zero(stage=0)
    assert len(loud.warnings) == 2
    assert silent.value == _zero(stage=2, offload_param=none)
    assert silent.warnings == ()


@pytest.mark.parametrize("keys", CUDA_ONLY, ids=".".join)
def test_nvidia_features_are_refused_on_a_cpu_alone(keys: tuple[str, ...]) -> None:
    document = Document(nested(keys, True), "my.json")

    check_device(document.value, "cuda", document.where)
    with pytest.raises(DeepSpeedConfigError, match=rf"my\.json: .*{keys[-1]} = true needs an NVIDIA GPU"):
        check_device(document.value, "cpu", document.where)


def test_checking_imports_no_heavy_library() -> None:
    program = (
        "import sys; from tuner.zero.lint import check; from tuner.zero.config import Document;"
        "check(Document({'bf16': {'enabled': True}}, 'x'));"
        "print({'torch', 'deepspeed', 'pydantic', 'numpy', 'transformers'} & set(sys.modules))"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "set()\n"
