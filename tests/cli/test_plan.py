"""`tuner plan` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Tuner
from tests.machine.gpus import A100, V100, machine
from tuner.hooks import Measurement
from tuner.machine import hardware
from tuner.zero import presets

FULL = "llama2_7b_full_alpaca_e3"


def plan(tuner: Tuner, *arguments: str) -> dict[str, Any]:
    done = tuner("plan", *arguments, "--json")
    assert done.code == 0, done.err
    value: dict[str, Any] = json.loads(done.out)
    return value


def test_the_json_holds_every_preset_and_the_recommended_one(tuner: Tuner) -> None:
    value = plan(tuner, FULL, "--gpus", "8", "--gpu-memory", "80GB")
    sizes = {name: found["gpu_bytes"]["model_states"] / 6_738_415_616 for name, found in value["presets"].items()}

    published = {
        "none": 16,
        "deepspeed_zero1": 5.5,
        "deepspeed_zero2": 3.75,
        "deepspeed_zero2_offload": 2,
        "deepspeed_zero3": 2,
        "deepspeed_zero3_offload": 0,
    }
    assert [*sizes] == [rung.name for rung in presets.rungs()]
    assert {name: sizes[name] for name in published} == pytest.approx(published)
    assert value["recommended"] == "deepspeed_zero1"
    assert next(iter(value.items())) == ("version", 1)
    assert [name for name, found in value["presets"].items() if not found["fits"]] == ["none"]


def test_a_gpus_name_is_its_memory(tuner: Tuner) -> None:
    by_name = plan(tuner, FULL, "--gpus", "8", "--gpu", "A100-80GB")
    by_size = plan(tuner, FULL, "--gpus", "8", "--gpu-memory", "80GiB")

    assert by_name["presets"] == by_size["presets"]


def test_where_nothing_fits_the_changes_that_do_are_printed(tuner: Tuner) -> None:
    done = tuner("plan", FULL, "--gpus", "1", "--gpu", "rtx4090", "--host-memory", "16GB")

    assert done.code == 0
    assert "Nothing fits." in done.out
    assert "QLoRA" in done.out
    assert "quantization=dict(bits=4)" in done.out


def test_an_interconnect_adds_seconds_and_hierarchical_partitioning_across_nodes(tuner: Tuner) -> None:
    value = plan(tuner, FULL, "--gpus", "8", "--gpu", "h100", "--nodes", "8", "--interconnect", "50GB/s")
    steps = value["communication"]

    assert steps["deepspeed_zero3_hpz"]["step_s"] < steps["deepspeed_zero3"]["step_s"]
    assert "step_s" not in plan(tuner, FULL, "--gpus", "8", "--gpu", "h100")["communication"]["deepspeed_zero3"]


def test_what_a_small_step_costs_is_told_where_it_is_a_twentieth_or_more(tuner: Tuner) -> None:
    arguments = ("qwen3_8b_full_alpaca_e3", "--gpus", "8", "--gpu", "h100", "--interconnect", "8x400Gb/s")
    value = plan(tuner, *arguments)
    step = value["communication"][value["recommended"]]
    alone = plan(tuner, "qwen3_8b_lora_alpaca_e3", "--gpus", "1", "--gpu", "h100")

    beside = step["update_s"] + step["visible_communication_s"]
    assert value["price_of_step"]["part"] == pytest.approx(beside / step["step_s"]) and beside > 0.05 * step["step_s"]
    assert value["price_of_step"]["larger_tokens"] == 4 * value["tokens_per_step"]
    assert 0 < value["price_of_step"]["gain"] < value["price_of_step"]["part"] / (1 - value["price_of_step"]["part"])
    assert alone["price_of_step"] is None
    assert "131,072 tokens" in " ".join(tuner("plan", *arguments).out.split())


def test_zero3_gathers_of_a_4_bit_base_what_it_shards_and_no_scales(tuner: Tuner) -> None:
    arguments = ("--gpus", "8", "--gpu", "h100", "--set", "accumulative_counts=1")
    value = plan(tuner, "llama2_7b_qlora_alpaca_e3", *arguments)
    counts = value["parameters"]
    held = 2 * (counts["trainable"] + counts["frozen"]) + counts["quantized"] / 2

    assert value["communication"]["deepspeed_zero3"]["gather_bytes"] == pytest.approx(2 * 7 / 8 * held)


def test_a_laptop_assumes_a_machine_aloud(tuner: Tuner) -> None:
    done = tuner("plan", FULL)

    assert done.code == 0
    assert "assumed" in done.out


def test_fewer_gpus_than_are_here_are_the_smallest_of_them(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "detect", lambda _: machine(A100, V100))

    assert f"machines: 1 node with 1 x {V100.name} " in tuner("plan", FULL, "--gpus", "1").out
    assert plan(tuner, FULL, "--gpus", "1")["machines"]["gpu_bytes"] == V100.memory_bytes


def rows(folder: Path, num: int) -> str:
    """Write a data file of so many rows."""
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    file = folder / "rows.jsonl"
    file.write_text((json.dumps({"messages": turns}) + "\n") * num)
    return str(file)


def test_the_number_of_optimizer_steps_is_that_of_a_dry_run(tuner: Tuner, tmp_path: Path) -> None:
    arguments = ("tiny_full_custom_e2", "--data", rows(tmp_path, 1000), "--set", "packing=False")

    planned = tuner("plan", *arguments, "--gpus", "1", "--gpu", "t4")
    counted = plan(tuner, *arguments, "--gpus", "1", "--gpu", "t4")["batch"]
    dry_run = json.loads(tuner("train", *arguments, "--dry-run", "--json").out)["batch"]

    assert "steps: 1,000 (fewer if rows are dropped: no token to train on within max_length)\n" in planned.out
    assert counted["steps"] == dry_run["steps"] == 1000
    assert counted.items() <= dry_run.items()


def test_too_few_steps_are_warned_of_with_what_gives_more(tuner: Tuner, tmp_path: Path) -> None:
    arguments = ("tiny_full_custom_e1", "--data", rows(tmp_path, 30), "--gpus", "8", "--gpu", "t4")

    done = tuner("plan", *arguments)

    (warned,) = plan(tuner, *arguments)["warnings"]
    assert "only 1 optimizer step" in warned
    assert f"WARNING: {warned}" in done.out
    assert plan(tuner, *arguments, "--set", "max_steps=3")["warnings"] == []


def test_without_a_recipe_it_says_which_method_is_used_and_how_to_choose_another(tuner: Tuner) -> None:
    arguments = ("--model", "Qwen/Qwen3-8B", "--data", "tatsu-lab/alpaca", "--gpus", "8", "--gpu", "t4")

    assert "model: Qwen/Qwen3-8B (LoRA, SFT; --method chooses another), " in tuner("plan", *arguments).out
    assert "model: Qwen/Qwen3-8B (QLoRA, SFT), " in tuner("plan", *arguments, "--method", "qlora").out


def test_of_a_model_that_is_not_known_it_says_the_steps_and_how_its_memory_would_be_known(tuner: Tuner) -> None:
    arguments = (FULL, "--model", "nobody/knows-this", "--gpus", "8", "--gpu", "h100")

    done = tuner("plan", *arguments)

    assert done.code == 0 and "steps: " in done.out
    assert "the memory is not known" in done.out and "hf download nobody/knows-this config.json" in done.out
    value = plan(tuner, *arguments)
    assert value["presets"] == {} and "nobody/knows-this" in value["warnings"][0]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--gpus", "0"], "--gpus"),
        (["--gpus", "-8"], "--gpus"),
        (["--nodes", "0"], "--nodes"),
        (["--gpu", "a1000"], "a100"),
        (["--gpu-memory", "80 quarks"], "80 quarks"),
        (["--gpu-memory", "0GB"], "--gpu-memory"),
        (["--gpu-memory", "-1GB"], "--gpu-memory"),
        (["--host-memory", "lots"], "--host-memory"),
        (["--gpu", "a100", "--gpu-memory", "80GB"], "--gpu and --gpu-memory"),
        (["--gpus", "8", "--interconnect", "fast", "--gpu", "a100"], "--interconnect"),
        (["--gpu-memory", "80GB", "--interconnect", "400Gb/s"], "--gpu a100-80g"),
        (["--gpu", "a100", "--interconnect", "400Gb/s", "--utilisation", "0"], "--utilisation"),
        (["--gpu", "a100", "--interconnect", "400Gb/s", "--utilisation", "nan"], "--utilisation"),
        (["--set", "architecture.model_type=llamas"], "llama"),
        (["--set", "architecture.num_key_value_heads=0"], "num_key_value_heads"),
    ],
)
def test_a_mistake_is_one_line_with_exit_code_2(tuner: Tuner, arguments: list[str], word: str) -> None:
    done = tuner("plan", FULL, *arguments)

    assert done.code == 2
    assert word in done.err
    assert "Traceback" not in done.err
    assert not done.out


def test_max_context_holds_each_level_for_every_number_of_ranks_that_may_share_a_row(tuner: Tuner) -> None:
    value = plan(tuner, FULL, "--gpus", "4", "--gpu", "h100", "--host-memory", "1900GB", "--max-context")

    as_it_is, with_everything = (value["max_context"][name] for name in ("as_it_is", "with_everything"))
    assert {context["sequence_parallel_size"] for context in as_it_is} == {1, 2, 4}
    assert len(as_it_is) == len(with_everything) == 3 * len(presets.rungs())
    longest = {(context["level"], context["sequence_parallel_size"]): context["tokens"] for context in with_everything}
    assert longest["deepspeed_zero3_offload", 4] > 3 * longest["deepspeed_zero3_offload", 1] > 0


def test_a_plan_of_ranks_that_share_samples_counts_groups(tuner: Tuner) -> None:
    shared = plan(tuner, FULL, "--gpus", "8", "--gpu", "h100", "--set", "sequence_parallel_size=4")
    apart = plan(tuner, FULL, "--gpus", "2", "--gpu", "h100")

    assert shared["tokens_per_step"] == apart["tokens_per_step"]
    refused = tuner("plan", FULL, "--gpus", "8", "--gpu", "h100", "--set", "sequence_parallel_size=3")
    assert refused.code == 2 and "cannot be grouped by 3" in refused.err


def test_a_chosen_config_stands_beside_the_levels(tuner: Tuner, tmp_path: Path) -> None:
    machines = ("--gpus", "8", "--gpu", "a100-80g", "--set", "batch_size=1", "--set", "gradient_checkpointing=True")
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "overlap_comm": True}}))

    preset = plan(tuner, FULL, *machines, "--deepspeed", "zero3")
    changed = plan(tuner, FULL, *machines, "--deepspeed", "zero3", "--ds", "zero_optimization.overlap_comm=false")
    own = plan(tuner, FULL, *machines, "--deepspeed", str(file))
    shown = tuner("plan", FULL, *machines, "--ds", "stage=2")

    assert plan(tuner, FULL, *machines)["chosen"] is None
    assert preset["chosen"]["gpu_bytes"] == preset["presets"]["deepspeed_zero3"]["gpu_bytes"]
    assert changed["chosen"]["gpu_bytes"]["total"] < preset["chosen"]["gpu_bytes"]["total"]
    assert own["chosen"]["name"] == str(file)
    assert [line.split()[-1] for line in shown.out.splitlines() if line.split()[:1] in (["none"], ["fits"])] == [
        "chosen",
        "yes",
    ]


def test_a_plan_counts_the_batch_and_the_compute_type_of_the_config_that_is_named(tuner: Tuner, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    file.write_text(json.dumps({"zero_optimization": {"stage": 3}, **batch}))
    accelerate = tmp_path / "mine.yaml"
    accelerate.write_text("distributed_type: DEEPSPEED\nmixed_precision: 'no'\ndeepspeed_config: {zero_stage: 2}\n")

    own = plan(tuner, FULL, "--gpus", "8", "--gpu", "h100", "--deepspeed", str(file))
    in_fp32 = plan(tuner, FULL, "--gpus", "8", "--gpu", "h100", "--deepspeed", str(accelerate))
    in_bf16 = plan(tuner, FULL, "--gpus", "8", "--gpu", "h100")

    assert own["tokens_per_step"] == 2 * 4 * 8 * 2048
    assert own["split"] == own["chosen"]["split"]
    weights = [planned["presets"]["none"]["gpu_bytes"]["weights"] for planned in (in_fp32, in_bf16)]
    assert weights[0] == 2 * weights[1]


def test_the_folder_of_nvme_fills_what_a_named_config_that_swaps_leaves_out(tuner: Tuner, tmp_path: Path) -> None:
    block, machines = {"device": "nvme"}, ("--gpus", "8", "--gpu", "h100", "--nvme", "/mnt/swap")
    zero = {"stage": 3, "offload_optimizer": block, "offload_param": {**block, "nvme_path": "/mnt/other"}}
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"zero_optimization": zero}))

    on_disk = plan(tuner, FULL, *machines, "--deepspeed", str(file))["chosen"]
    in_memory = plan(tuner, FULL, *machines, "--deepspeed", "zero3_offload")["chosen"]

    assert on_disk["gpu_bytes"]["buckets"] != in_memory["gpu_bytes"]["buckets"]
    assert tuner("plan", FULL, *machines[:4], "--deepspeed", str(file)).code == 2


def test_a_chosen_config_that_does_not_hold_is_one_message(tuner: Tuner) -> None:
    typo = tuner("plan", FULL, "--gpu", "h100", "--deepspeed", "zero3", "--ds", "zero_optimization.overlap_com=true")
    longest = tuner("plan", FULL, "--gpu", "h100", "--deepspeed", "zero3", "--max-context")

    assert (typo.code, longest.code) == (2, 2)
    assert "overlap_comm" in typo.err
    assert "--max-context" in longest.err


@pytest.mark.parametrize("model", [("tiny_full_custom_e1",), ("--model", "package:tiny")])
def test_a_file_without_rows_is_told_and_no_traceback(tuner: Tuner, tmp_path: Path, model: tuple[str, ...]) -> None:
    done = tuner("plan", *model, "--data", rows(tmp_path, 0), "--gpus", "1", "--gpu", "t4")

    assert done.code == 0 and "0 samples" in done.out and "there is nothing to train on" in done.out


def test_gpus_for_which_torch_has_no_kernels_are_named(tuner: Tuner) -> None:
    old, new = (plan(tuner, FULL, "--gpus", "8", "--gpu", gpu)["warnings"] for gpu in ("v100-32g", "t4"))

    assert any("torch has no kernels for" in line and "7.5 and newer" in line for line in old)
    assert not any("kernels" in line for line in new)


def test_one_gpu_has_a_time_with_its_range_and_attention_counts(tuner: Tuner) -> None:
    arguments = ("qwen3_8b_lora_alpaca_e3", "--gpus", "1", "--gpu", "h100", "--set", "gradient_checkpointing=False")

    short, long = (
        plan(tuner, *arguments, "--set", f"max_length={length}", "--set", f"global_batch_size={32768 // length}")
        for length in (2048, 32768)
    )

    least, most = short["communication"]["none"]["usual_step_s"]
    seconds, longer = (planned["communication"]["none"]["step_s"] for planned in (short, long))
    assert least < seconds < most and most == pytest.approx(1.5 * least)
    of_attention, of_longer = (planned["communication"]["none"]["attention_s"] for planned in (short, long))
    assert longer - seconds > 0.9 * (of_longer - of_attention)
    assert of_longer == pytest.approx(16 * of_attention)
    assert "one step: about" in tuner("plan", *arguments).out


def test_the_step_of_one_gpu_that_offloads_is_that_of_the_level_taken(tuner: Tuner) -> None:
    arguments = ("qwen3_8b_full_alpaca_e1", "--gpus", "1", "--gpu", "h100", "--host-memory", "512GB")

    planned = plan(tuner, *arguments)

    assert planned["recommended"] == "deepspeed_zero2_offload"
    (step,) = planned["communication"].values()
    assert step["update_s"] > 1, "the update on the processors"
    assert step["step_s"] == planned["step_s"]
    assert f"about {planned['step_s']:.2f} s" in tuner("plan", *arguments).out


@pytest.mark.parametrize(("gpus", "is_there"), [("1", False), ("2", True)])
def test_copies_inside_a_node_are_planned_where_a_node_has_several_gpus(
    tuner: Tuner, gpus: str, is_there: bool
) -> None:
    done = tuner("plan", "qwen3_0_6b_lora_alpaca_e1", "--nodes", "2", "--gpus", gpus, "--gpu", "h100", "--json")

    assert ("deepspeed_zero3_hpz" in json.loads(done.out)["communication"]) is is_there


def test_without_a_recipe_the_plan_is_a_table_of_what_the_gpu_trains(tuner: Tuner) -> None:
    value = plan(tuner, "qwen3_8b", "--gpu", "rtx4090", "--host-memory", "64GB")
    (found,) = value["models"]
    printed = tuner("plan", "qwen3_8b", "--gpu", "rtx4090", "--host-memory", "64GB").out

    assert value["version"] == 1 and value["machines"]["host_is_assumed"] is False
    assert found["methods"]["qlora"]["on_gpus"]["tokens"] == 29 * 1024
    assert found["methods"]["full"] == {"on_gpus": None, "offloaded": None}
    assert found["methods"]["qlora"]["on_gpus"]["command"] in printed


def test_a_pattern_names_the_models_of_the_table(tuner: Tuner) -> None:
    found = plan(tuner, "smollm2_1*", "--gpu", "rtx4090", "--method", "lora")["models"]

    assert [row["model"] for row in found] == [
        "smollm2_135m",
        "smollm2_135m_instruct",
        "smollm2_1_7b",
        "smollm2_1_7b_instruct",
    ]


def test_the_table_refuses_a_level_because_it_tries_all(tuner: Tuner) -> None:
    assert tuner("plan", "qwen3_8b", "--gpu", "rtx4090", "--deepspeed", "zero2").code == 2


def test_a_level_that_the_launch_would_refuse_does_not_fit(tuner: Tuner) -> None:
    arguments = ("llama2_7b_lora_alpaca_e3", "--gpus", "8", "--gpu", "a100-80g", "--ds", "autotp_size=2")
    levels = plan(tuner, *arguments)["presets"]
    of_lamb = plan(tuner, FULL, "--gpus", "8", "--gpu", "h200", "--set", "optimizer.type=Lamb")["presets"]

    in_memory = {rung.name for rung in presets.rungs() if rung.stage and not rung.offloaded}
    assert {name for name, level in levels.items() if level["fits"]} == in_memory
    assert all(level["fits"] == (level["refused"] is None) for level in levels.values())
    assert {name for name, level in of_lamb.items() if level["refused"]} == {*of_lamb} - {"none"}
    (verdicts,) = [line.split() for line in tuner("plan", *arguments).out.splitlines() if line.startswith("fits")]
    shown = ["yes" if level["fits"] else "refused" for level in levels.values()]
    assert verdicts == ["fits", *shown, "yes"], "the last column is the chosen config"


def test_a_compiled_model_with_the_loss_in_chunks_does_not_fit_at_zero_3(tuner: Tuner) -> None:
    compiled = ("--set", "torch_compile=True", "--set", "train_cfg.loss=chunked")
    levels = plan(tuner, FULL, "--gpus", "8", "--gpu", "h200", *compiled)["presets"]

    assert {name for name, level in levels.items() if level["refused"]} == {
        "deepspeed_zero3",
        "deepspeed_zero3_offload",
    }


def test_a_model_that_cannot_be_measured_has_no_numbers_and_the_reason(tuner: Tuner, tmp_path: Path) -> None:
    facts = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 128}
    facts |= {"intermediate_size": 64, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({**facts, "model_type": "minimax"}))

    value = plan(tuner, "tiny_full_sample_e1", "--model", str(tmp_path), "--gpus", "2", "--gpu", "h100")

    assert value["parameters"] is None
    assert any("this test measures nothing" in warning for warning in value["warnings"])


def test_the_longest_rows_are_those_of_levels_that_a_run_may_take(tuner: Tuner) -> None:
    arguments = ("llama2_7b_lora_alpaca_e3", "--gpus", "2", "--gpu", "h100", "--max-context")
    whole, split = (plan(tuner, *arguments, *more)["max_context"] for more in ((), ("--set", "autotp_size=2")))

    assert {row["level"] for row in whole["as_it_is"]} > {row["level"] for row in split["as_it_is"]}
    assert {row["level"] for row in split["as_it_is"]} == {f"deepspeed_zero{stage}" for stage in (1, 2, 3)}


def test_the_longest_rows_of_a_model_without_a_formula_are_those_that_were_measured(
    tuner: Tuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def measurement_of(model: Any, known: Any) -> Measurement:
        asked.append(known.model_type)
        return Measurement(None, "not measured here")

    monkeypatch.setattr("tuner.hooks.measurement_of", measurement_of)
    facts = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 128}
    facts |= {"intermediate_size": 64, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({**facts, "model_type": "minimax"}))

    done = tuner("plan", "tiny_full_sample_e1", "--model", str(tmp_path), "--gpu", "h100", "--max-context")

    assert asked == ["minimax"] and done.code != 0
