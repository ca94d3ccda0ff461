"""The level, the split and the loss that `auto` takes, against all of them enumerated here."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.launch.plans import NOW, PATH, made
from tests.machine.gpus import A100, CPU, H100, RTX4090, machine
from tuner.fit.candidates import traffic
from tuner.fit.estimate import fit_on
from tuner.fit.gpu_catalog import find
from tuner.fit.levels import Costs, Machines
from tuner.fit.operations import of_step
from tuner.fit.parameters import built, count
from tuner.fit.splits import possible_splits
from tuner.fit.step_time import Cluster, step_time
from tuner.launch.resolve import resolve_run
from tuner.launch.resolved_run import Request, ResolvedRun
from tuner.machine.hardware import Gpu, Hardware
from tuner.recipes import loading
from tuner.recipes.names import identify
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import RecipeConfig, Split
from tuner.zero import presets
from tuner.zero.config import swaps

LEVELS = [rung.name for rung in presets.rungs()]


class Pair(NamedTuple):
    level: str
    split: Split
    room: float
    seconds: float


def enumerated(name: str, gpu: Gpu, gpus: int, found: ResolvedRun) -> list[Pair]:
    """Return every level with every split of the run's batch, with the part of a GPU that it leaves and its seconds."""
    decided = ("train_cfg.loss", "train_cfg.global_batch_size", "model.attn_implementation")
    config = loading.load(name).config.with_values({key: attrgetter(key)(found.recipe.config) for key in decided})
    architecture = config.architecture
    assert architecture is not None
    cluster = Cluster(1, find(gpu.name), gpus)
    machines = Machines(gpus, gpu.memory_bytes)
    pairs = []
    for level in LEVELS:
        least = Costs.of_preset(level, architecture.hidden_size)
        for split in possible_splits(config, gpus):
            of_split = config.with_split(split)
            costs, room = least, 0.0
            for costs in (with_large_buckets(least, config, gpus), least):
                room = 1 - fit_on(of_split, architecture, level, costs, machines).peak.gpu_bytes / gpu.memory_bytes
                if room >= 0.1:
                    break
            sent = traffic(of_split, architecture, machines, costs)
            time = step_time(costs, sent, of_step(of_split, architecture, costs, gpus), cluster)
            pairs.append(Pair(level, split, room, time.total_s))
    return pairs


def with_large_buckets(least: Costs, config: RecipeConfig, gpus: int) -> Costs:
    """Return what docs/plan.md says that ranks send at a time where there is room."""
    architecture = config.architecture
    assert architecture is not None
    if gpus == 1 or least.offloads or not least.stage:
        return least
    layer = 0 if config.adapter else max(block.parameters for block in built(architecture).layers)
    reduced = max(least.reduce_bucket, min(100_000_000, count(config, architecture).trainable))
    if least.stage < 3:
        return least._replace(reduce_bucket=reduced, overlap=True)
    return least._replace(reduce_bucket=reduced, prefetch=max(least.prefetch, layer if layer <= 500_000_000 else 0))


def by_the_rule(pairs: list[Pair], gpus: int) -> tuple[str, Split]:
    """Return what docs/plan.md says that is taken, word by word."""
    possible_pairs = [pair for pair in pairs if pair.room >= 0 and (pair.level != "none" or gpus == 1)]
    offloading = [pair for pair in possible_pairs if presets.find(pair.level).offloaded]
    others = [pair for pair in possible_pairs if pair not in offloading]
    compared = others or offloading
    for spare in (0.1, 0.05):
        if enough := [pair for pair in compared if pair.room >= spare]:
            break
    else:
        most = max(compared, key=lambda pair: pair.room)
        return most.level, most.split
    names = [level for level in LEVELS if any(pair.level == level for pair in enough)]

    def best(level: str) -> Pair:
        return min(
            (pair for pair in enough if pair.level == level),
            key=lambda pair: (round(pair.seconds, 9), -pair.split.micro_batch),
        )

    for place, level in enumerate(names):
        higher = [best(name) for name in names[place + 1 :]]
        if not others or all(pair.seconds >= 0.9 * best(level).seconds for pair in higher):
            return level, best(level).split
    raise AssertionError


@pytest.mark.parametrize(
    ("name", "gpu", "gpus", "expected"),
    [
        ("qwen3_8b_full_alpaca_e3", H100, 4, "deepspeed_zero3"),  # 0.95 s; ZeRO-2 takes 1.07
        ("qwen3_14b_full_alpaca_e3", H100, 8, "deepspeed_zero3"),  # 0.87 s; ZeRO-2 takes 1.10
        ("qwen3_8b_full_alpaca_e3", H100, 8, None),
        ("qwen3_0_6b_full_alpaca_e3", H100, 8, None),
        ("qwen3_8b_lora_alpaca_e3", A100, 8, "deepspeed_zero1"),
        ("llama2_7b_full_alpaca_e3", A100, 8, None),
        ("qwen3_32b_full_alpaca_e3", H100, 8, None),
        ("gemma3_27b_it_full_alpaca_e1", H100, 8, "deepspeed_zero3"),
        ("qwen3_14b_lora_alpaca_e3", RTX4090, 8, None),
        ("qwen3_8b_qlora_alpaca_e3", RTX4090, 1, "none"),
        ("gemma3_12b_it_lora_alpaca_e1", RTX4090, 1, "deepspeed_zero3_offload"),
        ("llama3_1_8b_dpo_lora_ultrafeedback_binarized_e1", A100, 4, None),
    ],
)
def test_of_all_levels_and_splits_the_one_is_taken_that_the_rule_names(
    name: str, gpu: Gpu, gpus: int, expected: str | None
) -> None:
    found = made(recipe=name, hardware=known(gpu, gpus))

    level, split = by_the_rule(enumerated(name, gpu, gpus, found), gpus)
    assert (found.level, found.recipe.config.split) == (level, split)
    assert expected in (None, level)


@pytest.mark.parametrize(
    ("named", "is_taken"),
    [
        (Overrides(), False),
        (Overrides(nvme="/mnt/disk"), True),
        (Overrides(ds=["zero_optimization.offload_param.nvme_path=/mnt/disk"]), True),
    ],
)
def test_a_level_on_a_disk_is_taken_last_and_only_where_the_run_names_its_folder(
    named: Overrides, is_taken: bool
) -> None:
    asked = Request(identify("qwen3_8b_full_alpaca_e3"), named)
    small, large = (
        resolve_run(asked, PATH, machine(RTX4090)._replace(host_memory_bytes=size), NOW)
        for size in (64 * 10**9, 512 * 10**9)
    )

    assert large.level == "deepspeed_zero3_offload"
    assert (small.level == "deepspeed_zero3_nvme") is is_taken
    paths = [swap.path for swap in swaps(small.final.config)]
    assert paths == [Path("/mnt/disk")] * 2 * is_taken


def known(gpu: Gpu, gpus: int) -> Hardware:
    """Return GPUs in a host whose memory is not known."""
    return machine(*[gpu] * gpus)._replace(host_memory_bytes=0)


def test_the_runner_up_is_named_with_its_seconds() -> None:
    found = made(recipe="qwen3_8b_full_alpaca_e3", hardware=known(H100, 4))

    choice = found.level_and_split.choice
    assert choice and choice.runner_up
    assert choice.taken.level == found.level and choice.runner_up.level == "deepspeed_zero2"
    assert choice.taken.time and choice.runner_up.time
    assert (choice.taken.time.total_s, choice.runner_up.time.total_s) == pytest.approx((0.95, 1.07), abs=0.01)
    assert "0.95 s" in choice.describe() and "1.07 s" in choice.describe()


def test_a_compiled_model_which_cannot_have_chunks_at_zero_3_takes_a_level_and_a_loss_that_work() -> None:
    found = made("torch_compile=True", recipe="qwen3_8b_full_alpaca_e3", hardware=known(H100, 4))

    assert found.fit and found.fit.fits
    assert (found.level, found.recipe.config.train_cfg.loss) != ("deepspeed_zero3", "chunked")


# What ranks send at a time


FULL_8B = "qwen3_8b_full_alpaca_e3"
LAYER_8B = 192_946_432  # of Qwen3 8B, by hand: 2 x 4096 x 4096 + 2 x 4096 x 1024 + 3 x 4096 x 12288, and norms


def zero_of(found: ResolvedRun) -> dict[str, object]:
    zero: dict[str, object] = found.final.config["zero_optimization"]
    return zero


def test_zero3_gathers_a_whole_layer_ahead_and_reduces_1e8_gradients_where_there_is_room() -> None:
    found = made(recipe=FULL_8B, hardware=known(H100, 8), deepspeed="zero3")

    zero = zero_of(found)
    assert (zero["stage3_prefetch_bucket_size"], zero["reduce_bucket_size"]) == (LAYER_8B, 100_000_000)
    assert found.fit and found.fit.room >= 0.1
    assert found.fit.costs == Costs.of_config(found.final.config), "the plan counts what the run uses"
    origin = found.final.origins["zero_optimization.stage3_prefetch_bucket_size"]
    assert origin.text == "derived: the weights of a layer, which each GPU has room for"


def test_where_there_is_no_room_for_more_the_buckets_stay_small() -> None:
    found = made(recipe="qwen3_14b_full_alpaca_e3", hardware=known(H100, 2), deepspeed="zero3")

    zero = zero_of(found)
    assert found.fit and found.fit.room < 0.1
    assert (zero["stage3_prefetch_bucket_size"], zero["reduce_bucket_size"]) == (int(0.9 * 5120**2), 5120**2)


@pytest.mark.parametrize(("deepspeed", "overlaps"), [("zero1", True), ("zero2", True), ("zero2_offload", False)])
def test_gradients_are_sent_while_others_are_computed_unless_the_host_updates(deepspeed: str, overlaps: bool) -> None:
    found = made(recipe="qwen3_0_6b_full_alpaca_e3", hardware=known(H100, 8), deepspeed=deepspeed)

    assert zero_of(found)["overlap_comm"] is overlaps
    assert found.fit and found.fit.costs == Costs.of_config(found.final.config)


def test_own_values_of_buckets_and_overlap_stay(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text('{"zero_optimization": {"stage": 2, "overlap_comm": false, "reduce_bucket_size": 12345}}')
    of_file = made(recipe=FULL_8B, hardware=known(H100, 8), deepspeed=str(own))
    own.write_text('{"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 7}}')
    of_stage_3 = made(recipe=FULL_8B, hardware=known(H100, 8), deepspeed=str(own))

    assert (zero_of(of_file)["overlap_comm"], zero_of(of_file)["reduce_bucket_size"]) == (False, 12345)
    assert zero_of(of_stage_3)["stage3_prefetch_bucket_size"] == 7


@pytest.mark.parametrize("hardware", [CPU, known(H100, 1)])
def test_ranks_on_a_cpu_and_a_rank_alone_have_the_least_buckets(hardware: Hardware) -> None:
    found = made(recipe="tiny_full_sample_e1", hardware=hardware, deepspeed="zero2")

    assert zero_of(found)["overlap_comm"] is False
    assert found.level_and_split.buckets is None
