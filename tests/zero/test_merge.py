from __future__ import annotations

import copy
import json
import logging
import shlex
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime import config as deepspeed_config
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.machine.gpus import A100, CPU, H200, T4, V100, machine
from tests.refused import refused
from tests.zero.merged import TINY, merged, recipe_of
from tests.zero.presets import PRESETS
from tuner.errors import DeepSpeedConfigError, MachineError, ModelError, RecipeError
from tuner.machine.hardware import Hardware, decide_precision
from tuner.machine.topology import Batch
from tuner.optimizers import OPTIMIZERS
from tuner.recipes import catalog, loading
from tuner.recipes.merging import Kind, leaves
from tuner.recipes.schema import ParamScheduler
from tuner.zero import merge, presets
from tuner.zero.choice import open_config
from tuner.zero.config import OFFLOADS, ZERO, Document, FinalConfig, swaps_nowhere
from tuner.zero.config_schema import schema

GUIDE = Path(__file__).parent / "data" / "guide_ds_config.json"
LEVELS = presets.names()
BY_THEMSELVES = [
    name for name in LEVELS if not any(swaps_nowhere(presets.find(name).config, block) for block in OFFLOADS)
]
"""Presets that name every path that they need."""

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def _warning(final: FinalConfig, key: str) -> str:
    (found,) = [warning for warning in final.warnings if warning.startswith(key)]
    return found


def _sets(warning: str) -> list[str]:
    """Return the KEY=VALUE of each --set that a warning shows, as a shell would pass them on."""
    words = shlex.split(warning[warning.index("--set") :])
    return [word for flag, word in zip(words[::2], words[1::2], strict=True) if flag == "--set"]


def _deepspeed_reads(config: dict[str, Any]) -> deepspeed_config.DeepSpeedConfig:
    """Give a final config to DeepSpeed itself: one rank, since no process group is up."""
    return deepspeed_config.DeepSpeedConfig(copy.deepcopy(config))


# One owner for each fact


OWNED = {
    "gradient_accumulation_steps": ("accumulative_counts=4", 4, 7, "optim_wrapper.accumulative_counts"),
    "train_micro_batch_size_per_gpu": ("train_dataloader.batch_size=3", 3, 8, "train_dataloader.batch_size"),
    "gradient_clipping": ("max_norm=0.5", 0.5, 2.0, "optim_wrapper.clip_grad.max_norm"),
}


@pytest.mark.parametrize("key", OWNED)
def test_the_recipe_wins_over_the_json_and_the_warning_names_both(key: str) -> None:
    override, ours, theirs, recipe_key = OWNED[key]

    final = merged(f'{{\n  "{key}": {theirs}}}', override)

    warning = _warning(final, key)
    assert final.config[key] == ours
    assert repr(ours) in warning
    assert f"{theirs!r} in my.json:2:3" in warning
    assert recipe_key in warning
    assert final.origins[key].text == f"recipe {recipe_key} (--set {override})"
    assert [(old.value, str(old.place)) for old in final.origins[key].overridden] == [(theirs, "my.json:2:3")]


@pytest.mark.parametrize("key", OWNED)
@pytest.mark.parametrize("theirs", ["same", "auto", "absent"])
def test_where_the_json_agrees_or_says_auto_or_nothing_there_is_no_warning(key: str, theirs: str) -> None:
    override, ours, _, _ = OWNED[key]
    text = {"same": f'{{"{key}": {ours}}}', "auto": f'{{"{key}": "auto"}}', "absent": "{}"}[theirs]

    final = merged(text, override)

    assert final.config[key] == ours
    assert final.warnings == ()


def test_the_global_batch_is_recomputed_and_another_one_is_said() -> None:
    sets = ("train_dataloader.batch_size=3", "accumulative_counts=4")

    final = merged('{"train_batch_size": 64}', *sets, ranks=2)

    assert final.config["train_batch_size"] == 24
    assert "64 in my.json:1:2" in _warning(final, "train_batch_size")
    assert final.origins["train_batch_size"].text == "derived: 3 x 4 x 2 ranks"
    assert merged('{"train_batch_size": 24}', *sets, ranks=2).warnings == ()


def test_without_clip_grad_the_jsons_number_stands() -> None:
    final = merged('{"gradient_clipping": 2.5}', "clip_grad=None")

    assert final.config["gradient_clipping"] == 2.5
    assert final.origins["gradient_clipping"].text == "my.json:1:2"
    assert final.warnings == ()


@pytest.mark.parametrize("text", ["{}", '{"gradient_clipping": "auto"}'])
def test_no_clipping_anywhere_is_written_as_zero(text: str) -> None:
    final = merged(text, "clip_grad=None")

    assert final.config["gradient_clipping"] == 0.0
    assert "not clipped" in final.origins["gradient_clipping"].text


MACHINES = [
    pytest.param(machine(H200), "bf16", id="H200"),
    pytest.param(machine(A100, A100), "bf16", id="A100"),
    pytest.param(machine(T4), "fp16", id="T4"),
    pytest.param(machine(V100), "fp16", id="V100"),
    pytest.param(machine(A100, V100), "fp16", id="mixed, newest first"),
    pytest.param(machine(V100, H200), "fp16", id="mixed, oldest first"),
    pytest.param(CPU, None, id="CPU"),
]


@pytest.mark.parametrize(("hardware", "block"), MACHINES)
def test_the_compute_type_is_the_machines_over_any_json(hardware: Hardware, block: str | None) -> None:
    wrong = {"bf16": {"enabled": block != "bf16"}, "fp16": {"enabled": block != "fp16", "hysteresis": 4}}
    if block is None:
        del wrong["bf16"]  # the two may not both be on

    final = merged(json.dumps(wrong), hardware=hardware)

    assert final.config["bf16"]["enabled"] is (block == "bf16")
    assert final.config["fp16"] == {"enabled": block == "fp16", "hysteresis": 4}
    assert final.origins["fp16.enabled"].text.startswith("detected: ")
    assert "--set dtype=" in _warning(final, "fp16.enabled")


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("hardware", [machine(H200), machine(V100)], ids=["H200", "V100"])
def test_the_recipes_dtype_wins_over_the_machine_and_the_json(hardware: Hardware, dtype: str) -> None:
    theirs = {"bf16": {"enabled": dtype == "fp16"}, "fp16": {"enabled": dtype != "fp16"}}

    final = merged(json.dumps(theirs), f"dtype={dtype}", hardware=hardware)

    assert [block for block in ("bf16", "fp16") if final.config[block]["enabled"]] == [dtype] * (dtype != "fp32")
    assert final.origins["bf16.enabled"].text == f"recipe optim_wrapper.dtype (--set dtype={dtype})"


def test_everything_else_is_kept_as_written() -> None:
    kept = {
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 12345,
            "stage3_prefetch_bucket_size": 0,
            "overlap_comm": True,
            "stage3_gather_16bit_weights_on_model_save": True,
            "offload_param": {"device": "cpu", "pin_memory": True, "buffer_count": 7},
        },
        "flops_profiler": {"enabled": True, "profile_step": 3},
        "tensorboard": {"enabled": True, "output_path": "a b/"},
        "communication_data_type": "fp32",
        "steps_per_print": 7,
        "wall_clock_breakdown": True,
    }

    final = merged(json.dumps(kept), hardware=machine(A100))

    assert {key: final.config[key] for key in kept} == kept
    assert final.warnings == ()


# Optimizer and scheduler


BLOCKS = {
    "lr, betas, eps and decay": (
        {
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 3e-6, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1},
            }
        },
        {"type": "AdamW", "lr": 3e-6, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    ),
    "auto asks for nothing": (
        {"optimizer": {"type": "SGD", "params": {"lr": "auto", "weight_decay": 0.1}}},
        {"type": "SGD", "weight_decay": 0.1},
    ),
    "deepspeed reads its names in any case": ({"optimizer": {"type": "lion", "params": {}}}, {"type": "Lion"}),
    "deepspeed's Adam is AdamW": ({"optimizer": {"type": "Adam", "params": {"lr": 0.5}}}, {"type": "AdamW", "lr": 0.5}),
    "unless it says otherwise": (
        {"optimizer": {"type": "Adam", "params": {"lr": 0.5, "adam_w_mode": False}}},
        {"type": "Adam", "lr": 0.5},
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_flags_of_the_optimizer_warning_take_the_jsons_values(name: str) -> None:
    theirs, wanted = BLOCKS[name]
    final = merged(json.dumps(theirs), "lr=0.25")

    sets = _sets(_warning(final, "optimizer"))
    taken = recipe_of("lr=0.25", *sets)

    optimizer = taken.values["optim_wrapper"]["optimizer"]
    assert {key: optimizer[key] for key in wanted} == wanted
    assert "optimizer" not in final.config
    assert "my.json:1:2" in _warning(final, "optimizer")
    again = merged(json.dumps(theirs), "lr=0.25", *sets, hardware=machine(A100))
    assert not [text for text in again.warnings if text.startswith("optimizer")], "what was taken is no difference"


SCHEDULES = {
    "WarmupLR": ({"warmup_max_lr": 0.125}, {"type": "constant", "lr": 0.125}),
    "WarmupDecayLR": (
        {"warmup_max_lr": 0.125, "warmup_num_steps": 30, "total_num_steps": 400},
        {"type": "linear", "warmup_steps": 30, "lr": 0.125},
    ),
    "WarmupCosineLR": (
        {"warmup_num_steps": 100, "total_num_steps": 1000},
        {"type": "cosine", "warmup_steps": 100, "lr": 0.25},
    ),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_flags_of_the_scheduler_warning_take_the_jsons_values(kind: str) -> None:
    params, wanted = SCHEDULES[kind]
    theirs = json.dumps({"scheduler": {"type": kind, "params": params}})
    decay = ("decay_ratio=0.5", "decay_type=linear", "min_lr_ratio=0.1")
    start = ("lr=0.25", "param_scheduler.type=warmup_stable_decay", *decay)
    final = merged(theirs, *start)

    sets = _sets(_warning(final, "scheduler"))
    taken = recipe_of(*start, *sets).values

    assert {**taken["param_scheduler"], "lr": taken["optim_wrapper"]["optimizer"]["lr"]} | wanted == {
        **taken["param_scheduler"],
        "lr": taken["optim_wrapper"]["optimizer"]["lr"],
    }
    assert "scheduler" not in final.config
    assert not [text for text in merged(theirs, *start, *sets).warnings if text.startswith("scheduler")]


def test_each_key_of_some_schedules_alone_is_given_back_with_another_schedule() -> None:
    of_all = {"type", "warmup_ratio", "warmup_steps"}

    assert ParamScheduler.UNUSED.keys() == ParamScheduler.model_fields.keys() - of_all


WITHOUT_ROW = next(name for name in schema()["torch_optimizers"] if name not in OPTIMIZERS)
"""An optimizer that DeepSpeed reads from its JSON and that no recipe has."""


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({"optimizer": {"type": WITHOUT_ROW, "params": {"lr": 0.5}}}, WITHOUT_ROW),
        ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, "no amsgrad"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}}}, "OneCycle"),
    ],
)
def test_what_no_recipe_can_say_is_told(block: dict[str, Any], told: str) -> None:
    (kind,) = block

    warning = _warning(merged(json.dumps(block)), kind)

    assert told in warning
    assert "--set" not in warning


def test_a_block_that_agrees_or_says_only_auto_gives_no_warning() -> None:
    text = (
        '{"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999], "torch_adam": true}}, '
        '"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}}'
    )

    assert merged(text, "betas=(0.9, 0.999)", "param_scheduler.type=cosine").warnings == ()


@pytest.mark.parametrize(
    ("kind", "name", "stage"),
    [("Lamb", "Lamb", 0), ("Lion", "Lion", 1), ("FusedAdam", "AdamW", 3), ("Muon", "Muon", 2)],
)
def test_an_optimizer_of_deepspeed_is_written_with_the_recipes_values(kind: str, name: str, stage: int) -> None:
    text = f'{{"zero_optimization": {{"stage": {stage}}}}}'
    sets = (f"optimizer.type={kind}", "lr=0.5", "eps=1e-7", "clip_grad=None")
    final = merged(text, *sets, hardware=machine(A100))

    block = final.config["optimizer"]
    assert block["type"] == name
    assert (block["params"]["lr"], block["params"]["betas"]) == (
        0.5,
        list(recipe_of().values["optim_wrapper"]["optimizer"]["betas"]),
    )
    assert block["params"].get("eps", 1e-7) == 1e-7
    assert ("eps" in block["params"]) is (kind != "Lion"), "DeepSpeed's Lion has none"
    assert final.origins["optimizer.params.lr"].text.startswith("recipe optim_wrapper.optimizer")
    _deepspeed_reads(final.config)


@pytest.mark.parametrize("kind", ["Lamb", "FusedAdam"])
def test_an_optimizer_with_gpu_kernels_alone_is_refused_on_a_cpu(kind: str) -> None:
    with pytest.raises(MachineError, match=f"DeepSpeed's {kind} needs a GPU.*Use AdamW"):
        merged("{}", f"optimizer.type={kind}")


def test_lion_runs_on_a_cpu_where_it_is_offloaded() -> None:
    offloads = '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}'
    cpu = CPU._replace(has_compiler=True)

    assert merged(offloads, "optimizer.type=Lion", hardware=cpu).config["optimizer"]["type"] == "Lion"
    with pytest.raises(MachineError, match=r"Lion needs a GPU or offloading.*zero2_offload"):
        merged("{}", "optimizer.type=Lion", hardware=cpu)
    with pytest.raises(MachineError, match=r"Lion needs a compiler.*g\+\+"):
        merged(offloads, "optimizer.type=Lion", hardware=CPU._replace(has_compiler=False))


def test_offloaded_moments_in_bf16_are_made_by_deepspeed() -> None:
    text = (
        '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},'
        ' "bf16": {"bf16_master_weights_and_grads": true, "bf16_optimizer_states": true}}'
    )
    cpu = CPU._replace(has_compiler=True)

    final = merged(text, "dtype=bf16", "lr=0.5", hardware=cpu)

    assert (final.config["optimizer"]["type"], final.config["optimizer"]["params"]["lr"]) == ("AdamW", 0.5)
    with pytest.raises(DeepSpeedConfigError, match=r"needs optimizer.type AdamW, no LoRA\+"):
        merged(text, "dtype=bf16", "optimizer.type=SGD", hardware=cpu)
    with pytest.raises(MachineError, match=r"needs a compiler.*g\+\+"):
        merged(text, "dtype=bf16", hardware=CPU._replace(has_compiler=False))


def test_muon_has_a_rate_of_its_own_and_whole_gradients_at_stage_3() -> None:
    sets = ("optimizer.type=Muon", "muon_lr=0.02", "clip_grad=None")
    at_two, at_three = (merged(f'{{"zero_optimization": {{"stage": {stage}}}}}', *sets) for stage in (2, 3))

    assert at_three.config["optimizer"]["params"]["muon_lr"] == 0.02
    assert at_three.config["zero_optimization"]["reduce_scatter"] is False
    assert "reduce_scatter" not in at_two.config["zero_optimization"]
    _deepspeed_reads(at_three.config)


@pytest.mark.parametrize(
    ("text", "sets", "said"),
    [
        ("{}", ("optimizer.type=Muon",), "clips Muon's update, not the gradient.*clip_grad=None"),
        ('{"gradient_clipping": 1.0}', ("optimizer.type=Muon", "clip_grad=None"), "clips Muon's update"),
        ('{"zero_optimization": {"stage": 1}}', ("optimizer.type=Lamb",), "Lamb scales a layer's update.*AdamW"),
    ],
)
def test_an_optimizer_that_a_stage_trains_otherwise_is_refused(text: str, sets: tuple[str, ...], said: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=said):
        merged(text, *sets, hardware=machine(A100))


# Compilation


def test_deepcompile_is_the_recipes_to_ask_for_and_keeps_the_jsons_options() -> None:
    text = '{"zero_optimization": {"stage": 3}, "compile": {"double_buffer": false}}'

    final = merged(text, "torch_compile=deepcompile", hardware=machine(A100))

    assert final.config["compile"] == {"double_buffer": False, "deepcompile": True}
    assert final.origins["compile.deepcompile"].text.startswith("recipe train_cfg.torch_compile")
    _deepspeed_reads(final.config)


@pytest.mark.parametrize(
    ("stage", "value", "hardware", "told"),
    [
        (3, "deepcompile", CPU, "needs NVIDIA GPUs"),
        (0, "deepcompile", machine(A100), "ZeRO stage 1, 2 and 3, and this is stage 0"),
        (2, "True", CPU._replace(has_compiler=False), "torch.compile needs g"),
    ],
)
def test_what_cannot_be_compiled_is_refused(stage: int, value: str, hardware: Hardware, told: str) -> None:
    with pytest.raises((MachineError, DeepSpeedConfigError), match=told):
        merged(f'{{"zero_optimization": {{"stage": {stage}}}}}', f"torch_compile={value}", hardware=hardware)


# Buckets and "auto"


def test_bucket_sizes_follow_from_the_hidden_size() -> None:
    final = merged(open_config("zero3", "--deepspeed"), name="qwen3_8b_lora_alpaca_e1")

    zero = final.config["zero_optimization"]
    assert zero["reduce_bucket_size"] == 4096 * 4096
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * 4096 * 4096)
    assert zero["stage3_param_persistence_threshold"] == 10 * 4096
    assert final.origins["zero_optimization.reduce_bucket_size"].text == "derived: h^2, hidden size h = 4096"
    assert all(type(zero[key]) is int for key in zero if key.endswith("bucket_size"))


def test_an_unknown_hidden_size_takes_deepspeeds_own_defaults_written_out() -> None:
    final = merged(open_config("zero3", "--deepspeed"), "model.path=someone/unknown")

    zero, defaults = (
        final.config["zero_optimization"],
        deepspeed_config.DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {"stage": 3}}).zero_config,
    )
    assert zero["reduce_bucket_size"] == defaults.reduce_bucket_size
    assert zero["stage3_prefetch_bucket_size"] == defaults.prefetch_bucket_size
    assert zero["stage3_param_persistence_threshold"] == defaults.param_persistence_threshold
    assert "unknown" in final.origins["zero_optimization.reduce_bucket_size"].text


@pytest.mark.parametrize(("stage", "written", "overlaps"), [(2, "auto", False), (2, True, True), (3, "auto", True)])
def test_sending_while_others_compute_is_decided_where_it_is_open(
    stage: int, written: str | bool, overlaps: bool
) -> None:
    final = merged(json.dumps({"zero_optimization": {"stage": stage, "overlap_comm": written}}))

    assert final.config["zero_optimization"]["overlap_comm"] is overlaps
    assert not [text for text in final.warnings if "overlap_comm" in text]


GATHER = "stage3_gather_16bit_weights_on_model_save"


@pytest.mark.parametrize("theirs", [{}, {GATHER: "auto"}, {GATHER: False}, {GATHER: True}])
def test_at_stage_3_weights_are_gathered_so_that_the_result_is_whole(theirs: dict[str, Any]) -> None:
    final = merged(json.dumps({"zero_optimization": {"stage": 3, **theirs}}))

    assert final.config["zero_optimization"][GATHER] is True
    assert any(GATHER in warning for warning in final.warnings) is (theirs == {GATHER: False})


@pytest.mark.parametrize("key", [GATHER, "stage3_prefetch_bucket_size"])
def test_a_stage_3_auto_below_stage_3_is_left_out(key: str) -> None:
    final = merged(json.dumps({"zero_optimization": {"stage": 2, key: "auto"}}))

    assert key not in final.config["zero_optimization"]


@pytest.mark.parametrize("kind", ["SGD", "NAdam", "AdamW8bit"])
def test_an_optimizer_that_deepspeed_never_tested_is_allowed_also_under_a_users_json(kind: str) -> None:
    final = merged('{"zero_optimization": {"stage": 2}}', f"optimizer.type={kind}")

    assert final.config["zero_allow_untested_optimizer"] is True


def _assert_final(final: FinalConfig) -> None:
    found = dict(leaves(final.config))
    assert "auto" not in found.values()
    assert found.keys() == final.origins.keys()
    assert all(origin.text for origin in final.origins.values())
    assert json.loads(json.dumps(final.config, allow_nan=False)) == final.config
    assert "gradient_clipping" in found
    assert not (final.config["bf16"]["enabled"] and final.config["fp16"]["enabled"])


RECIPES = [
    TINY,
    "tiny_full_sample",
    "tiny_qlora_sample_e1",
    "internlm2_chat_7b_qlora_oasst1_e3",
    "qwen2_5_72b_instruct_full_alpaca_e1",
    "gemma2_9b_it_dora_alpaca_e1",
    "llama3_1_8b_instruct_pretrain_lora_alpaca_e2",
]
BARE_CPU = Hardware((), 1, 0, has_compiler=False)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("hardware", [CPU, BARE_CPU, machine(T4), machine(H200)], ids=["CPU", "bare", "T4", "H200"])
def test_no_auto_is_left_and_every_value_has_an_origin_whatever_is_combined(name: str, hardware: Hardware) -> None:
    for level in BY_THEMSELVES:
        final = merged(open_config(level, "--deepspeed"), hardware=hardware, name=name)

        _assert_final(final)
        _deepspeed_reads(final.config)


@pytest.mark.parametrize("name", PRESETS)
def test_no_auto_is_left_of_the_presets_that_users_bring_along(name: str) -> None:
    final = merged(Document(PRESETS[name], "theirs.json"), hardware=machine(A100))

    _assert_final(final)
    assert _deepspeed_reads(final.config).zero_optimization_stage == PRESETS[name]["zero_optimization"]["stage"]


_NUMBER_OR_AUTO = st.one_of(st.integers(1, 64), st.just("auto"))
_ZERO_BLOCKS = st.fixed_dictionaries(
    {"stage": st.integers(0, 3)},
    optional={
        "reduce_bucket_size": _NUMBER_OR_AUTO,
        "stage3_prefetch_bucket_size": _NUMBER_OR_AUTO,
        "stage3_param_persistence_threshold": _NUMBER_OR_AUTO,
        "stage3_gather_16bit_weights_on_model_save": st.one_of(st.booleans(), st.just("auto")),
        "overlap_comm": st.booleans(),
        "offload_optimizer": st.fixed_dictionaries({"device": st.sampled_from(["none", "cpu"])}),
        "offload_param": st.fixed_dictionaries({"device": st.sampled_from(["none", "cpu"])}),
    },
)
_FRAGMENTS = st.fixed_dictionaries(
    {},
    optional={
        "train_batch_size": _NUMBER_OR_AUTO,
        "train_micro_batch_size_per_gpu": _NUMBER_OR_AUTO,
        "gradient_accumulation_steps": _NUMBER_OR_AUTO,
        "gradient_clipping": st.one_of(st.floats(0, 10), st.just("auto")),
        "bf16": st.fixed_dictionaries({"enabled": st.sampled_from([False, "auto"])}),
        "fp16": st.fixed_dictionaries({"enabled": st.sampled_from([True, False, "auto"])}),
        "zero_optimization": _ZERO_BLOCKS,
        "steps_per_print": st.integers(1, 9),
        "optimizer": st.fixed_dictionaries(
            {"type": st.sampled_from(["AdamW", "adam", "SGD"])},
            optional={"params": st.fixed_dictionaries({"lr": st.one_of(st.floats(1e-7, 1), st.just("auto"))})},
        ),
    },
)


@given(fragment=_FRAGMENTS, hardware=st.sampled_from([CPU, BARE_CPU, machine(V100), machine(H200)]))
@settings(max_examples=60, deadline=None)
def test_any_json_becomes_a_final_config_that_deepspeed_reads(fragment: dict[str, Any], hardware: Hardware) -> None:
    before = copy.deepcopy(fragment)

    final = merged(Document(fragment, "my.json"), hardware=hardware)

    _assert_final(final)
    assert fragment == before
    assert _deepspeed_reads(final.config).zero_optimization_stage == before.get("zero_optimization", {}).get("stage", 0)


def test_nothing_that_goes_in_is_changed() -> None:
    loaded, document, batch = recipe_of(), open_config(str(GUIDE), "--deepspeed"), Batch(1, 1, 1)
    values, before = copy.deepcopy(loaded.values), copy.deepcopy(document.value)

    merge.merge(loaded, document, batch, decide_precision("auto", CPU), CPU)

    assert document.value == before
    assert loaded.values == values


# Offload


OFFLOADS = ("deepspeed_zero2_offload", "deepspeed_zero3_offload")
FORCE = "zero_force_ds_cpu_optimizer"


@pytest.mark.parametrize("preset", OFFLOADS)
def test_with_a_compiler_the_offloaded_optimizer_is_deepspeeds(preset: str) -> None:
    final = merged(open_config(preset, "--deepspeed"), hardware=machine(A100))

    assert final.config[FORCE] is True
    assert final.origins[FORCE].text == "detected: g++ and ninja, and nvcc beside GPUs"
    assert final.warnings == ()


@pytest.mark.parametrize("preset", OFFLOADS)
def test_without_a_compiler_it_is_torchs_and_that_is_said(preset: str) -> None:
    final = merged(open_config(preset, "--deepspeed"), hardware=machine(A100, has_compiler=False))

    assert final.config[FORCE] is False
    (warning,) = final.warnings
    assert "several times slower than DeepSpeedCPUAdam" in warning


def test_a_json_that_insists_on_deepspeeds_optimizer_needs_the_compiler() -> None:
    text = f'{{"{FORCE}": true, "zero_optimization": {{"stage": 2, "offload_optimizer": {{"device": "cpu"}}}}}}'

    with pytest.raises(MachineError) as caught:
        merged(text, hardware=machine(A100, has_compiler=False))

    assert str(caught.value.where) == "my.json:1:2"
    assert merged(text, hardware=machine(A100)).config[FORCE] is True


@pytest.mark.parametrize("preset", ["zero1", "zero2", "zero3", "none"])
def test_without_offload_nothing_is_said_about_its_optimizer(preset: str) -> None:
    final = merged(open_config(preset, "--deepspeed"), hardware=machine(A100, has_compiler=False))

    assert FORCE not in final.config
    assert final.warnings == ()


@pytest.mark.parametrize("hardware", [CPU, machine(A100)], ids=["CPU", "A100"])
def test_a_preset_pins_memory_only_where_there_is_a_gpu_to_copy_to(hardware: Hardware) -> None:
    final = merged(open_config("zero3_offload", "--deepspeed"), hardware=hardware)

    zero = final.config["zero_optimization"]
    assert [zero[block]["pin_memory"] for block in ("offload_optimizer", "offload_param")] == [bool(hardware.gpus)] * 2
    if not hardware.gpus:
        origin = final.origins["zero_optimization.offload_param.pin_memory"]
        assert origin.text == "detected: no GPU"
        assert [(old.value, str(old.place)) for old in origin.overridden] == [(True, "preset deepspeed_zero3_offload")]


def test_a_users_pin_memory_is_kept_on_a_cpu() -> None:
    text = '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}}}'

    assert merged(text).config["zero_optimization"]["offload_optimizer"]["pin_memory"] is True


# Choosing a config


@pytest.mark.parametrize("preset", catalog.presets())
def test_short_and_full_names_open_the_same_preset(preset: str) -> None:
    short = open_config(preset.removeprefix("deepspeed_"), "--deepspeed")

    assert short == open_config(preset, "--deepspeed")
    assert short.name == f"preset {preset}"


def test_none_is_deepspeed_at_stage_0() -> None:
    final = merged(open_config("none", "--deepspeed"))

    assert final.config["zero_optimization"] == {"stage": 0}
    assert final.from_catalog


def test_a_path_with_spaces_and_umlauts_opens(tmp_path: Path) -> None:
    path = tmp_path / "my größe" / "zero 2.json"
    path.parent.mkdir()
    path.write_text('{"steps_per_print": 5}', encoding="utf-8")

    assert open_config(str(path), "--deepspeed").value == {"steps_per_print": 5}


def test_a_file_in_this_folder_without_an_ending_opens(here: Path) -> None:
    (here / "mine").write_text("{}")

    assert open_config("mine", "--deepspeed").name == "mine"


def test_a_file_called_like_a_preset_is_still_the_users(here: Path) -> None:
    (here / "preset deepspeed.json").write_text("{}")

    assert not merged(open_config("preset deepspeed.json", "--deepspeed")).from_catalog


def test_a_dict_in_a_recipe_is_a_config_and_its_place_is_the_recipes(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f'_base_ = "{TINY}"\n\ndeepspeed = dict(zero_optimization=dict(stage=1), gradient_clipping=9.0)\n')
    loaded = loading.load(str(path))
    chosen = loaded.config.deepspeed
    assert isinstance(chosen, dict)

    final = merge.merge(loaded, open_config(chosen, f"{path}:3"), Batch(1, 1, 1), decide_precision("auto", CPU), CPU)

    assert final.config["zero_optimization"]["stage"] == 1
    assert f"9.0 in {path}:3" in _warning(final, "gradient_clipping")
    assert not final.from_catalog
    assert loaded.config.deepspeed == {"zero_optimization": {"stage": 1}, "gradient_clipping": 9.0}


@pytest.mark.parametrize("name", [TINY, "tiny_full_sample", "internlm2_chat_7b_qlora_oasst1_e3"])
def test_a_recipe_in_place_of_a_preset_is_told_so(name: str) -> None:
    with refused(DeepSpeedConfigError, "--deepspeed", f"tuner train {name} --deepspeed PRESET"):
        open_config(name, "--deepspeed")


@pytest.mark.parametrize("name", ["deepspeed_zero2", "deepspeed_zero3_offload", "my.json"])
def test_a_preset_in_place_of_a_recipe_is_told_so(name: str, here: Path) -> None:
    Path("my.json").write_text('{"zero_optimization": {"stage": 2}}')

    with refused(RecipeError, None if name == "my.json" else "the recipe's name", f"--deepspeed {name}"):
        loading.load(name)


@pytest.mark.parametrize(
    ("name", "meant"), [("zero4", "zero"), ("deepspeed_zero_2", "deepspeed_zero2"), ("zero3_ofload", "zero3_offload")]
)
def test_an_unknown_preset_names_the_nearest_and_all_there_are(name: str, meant: str) -> None:
    with refused(DeepSpeedConfigError, "--deepspeed", *LEVELS) as caught:
        open_config(name, "--deepspeed")
    assert f"Did you mean '{meant}" in (caught.value.fix or "")


@pytest.mark.parametrize("name", ["x" * 300, "eyJiZjE2Ijoge319", "missing.json", "no/such/file", "", "."])
def test_a_name_that_opens_nothing_is_one_error(name: str) -> None:
    with pytest.raises(DeepSpeedConfigError):
        open_config(name, "--deepspeed")


# The guide's sample


@pytest.mark.parametrize("hardware", [CPU, machine(H200), machine(V100)], ids=["CPU", "H200", "V100"])
def test_the_sample_of_the_guides_becomes_a_config_that_deepspeed_accepts(hardware: Hardware) -> None:
    final = merged(
        open_config(str(GUIDE), "--deepspeed"),
        "train_dataloader.batch_size=2",
        "accumulative_counts=8",
        hardware=hardware,
    )

    read = _deepspeed_reads(final.config)

    assert (read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (16, 2, 8)
    assert read.zero_optimization_stage == 2
    assert read.gradient_clipping == 1.0
    assert read.bfloat16_config.enabled is (hardware.has_native_bf16)
    assert read.float16_config.enabled is (bool(hardware.gpus) and not hardware.has_native_bf16)
    _assert_final(final)


# Layers that ranks split

_SPLIT = "autotp_size=2"


def test_the_recipe_says_over_how_many_ranks_layers_are_split_and_the_head_stays_whole() -> None:
    final = merged('{"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}', _SPLIT, ranks=2)

    assert final.config["tensor_parallel"] == {"autotp_size": 2, "vocab_parallel_lm_head": False}
    assert final.config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True
    assert "tensor_parallel" not in merged('{"zero_optimization": {"stage": 1}}').config
    assert not [warning for warning in final.warnings if warning.startswith("tensor_parallel")]


def test_a_recipe_with_another_number_wins_and_says_so() -> None:
    final = merged('{"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 4}}', _SPLIT, ranks=2)

    assert final.config["tensor_parallel"]["autotp_size"] == 2
    assert _warning(final, "tensor_parallel.autotp_size")


@pytest.mark.parametrize(
    "beside",
    [
        '"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}',
        '"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}',
        '"zero_optimization": {"stage": 1}, "tensor_parallel": {"preset_model": "llama"}',
        '"zero_optimization": {"stage": 1}, "tensor_parallel": {"tp_overlap_comm": true}',
    ],
)
def test_what_was_not_tried_beside_split_layers_is_refused(beside: str) -> None:
    merged(f"{{{beside}}}", ranks=2)
    with pytest.raises(DeepSpeedConfigError):
        merged(f"{{{beside}}}", _SPLIT, ranks=2)


def test_without_zero_split_layers_need_fp32_where_deepspeed_takes_the_right_norm() -> None:
    merged('{"zero_optimization": {"stage": 0}}', _SPLIT, "dtype=fp32", ranks=2)
    merged('{"zero_optimization": {"stage": 1}}', _SPLIT, "dtype=bf16", ranks=2)
    with pytest.raises(DeepSpeedConfigError):
        merged('{"zero_optimization": {"stage": 0}}', _SPLIT, "dtype=bf16", ranks=2)


_TO_DISK: dict[str, object] = {"device": "nvme", "nvme_path": "/mnt/swap"}
_BUFFER = f"{ZERO}.offload_param.buffer_size"


def _swapping(least: int | None, **settings: object) -> FinalConfig:
    text = json.dumps({ZERO: {"stage": 3, "offload_param": _TO_DISK | settings}})
    return merged(text, swap_buffer=least)


@pytest.mark.parametrize("settings", [{}, {"buffer_size": "auto"}])
def test_an_open_size_of_the_buffers_of_a_disk_is_that_of_the_largest_weight(settings: dict[str, object]) -> None:
    final, of_unknown_model = _swapping(131_072_000, **settings), _swapping(None, **settings)

    assert final.config[ZERO]["offload_param"]["buffer_size"] == 131_072_000
    assert final.origins[_BUFFER].place.kind is Kind.DERIVED
    assert not [warning for warning in final.warnings if "buffer_size" in warning]
    assert "buffer_size" not in of_unknown_model.config[ZERO]["offload_param"]


def test_a_buffer_of_a_disk_in_which_the_largest_weight_has_no_room_is_refused_with_the_size_to_write() -> None:
    with pytest.raises(DeepSpeedConfigError) as caught:
        _swapping(131_072_000, buffer_size=100_000_000)

    assert f"--ds {_BUFFER}=131072000" in str(caught.value.fix)
    assert "my.json:1" in str(caught.value.where)
    assert _swapping(131_072_000, buffer_size=131_072_000).config[ZERO]["offload_param"]["buffer_size"] == 131_072_000
    assert _swapping(None, buffer_size=7).config[ZERO]["offload_param"]["buffer_size"] == 7


def test_dora_on_quantized_weights_is_refused_at_zero3_alone() -> None:
    def at(stage: int, *sets: str) -> FinalConfig:
        return merged(json.dumps({ZERO: {"stage": stage}}), *sets, ranks=2, name="tiny_qlora_sample_e1")

    at(2, "adapter.use_dora=True")
    at(3)
    with refused(ModelError, "adapter.use_dora"):
        at(3, "adapter.use_dora=True")
