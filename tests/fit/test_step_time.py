"""Seconds of a step against published speeds, and what each part of a step adds to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from tuner.fit.candidates import traffic
from tuner.fit.gpu_catalog import GPUS, KnownGpu, of_sheet
from tuner.fit.levels import Costs, Machines
from tuner.fit.operations import Lora, of_step
from tuner.fit.step_time import OFF_BY, Cluster, Operations, StepTime, Traffic, step_time
from tuner.recipes import loading
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import Split

H100, H200, A100, RTX4090 = (GPUS[name] for name in ("h100-80g", "h200", "a100-80g", "rtx4090"))
LIMITED_H100 = of_sheet(97871, 989 * 5 / 7, 450, (9, 0), 2400, 792.1 * 5 / 7)
"""torchtitan's H100: 96 GB of HBM2e at 2.4 TB/s, and 500 W. Its peak is unknown, between those of SXM and NVL, as
torchtitan says; 500 of 700 W of the SXM's is an assumption."""
INTERCONNECT = 400e9  # 8 x 400 Gb/s


@dataclass(frozen=True)
class Published:
    """A speed that somebody has measured, tokens/s of one GPU, and the recipe that means the same here.

    Args:
        selective: torchtitan's selective recomputation: element-wise operations, and every second matrix product.
    """

    tokens_s: int
    recipe: str
    gpu: KnownGpu
    split: Split
    row: int
    loss: str = "whole"
    gpus: int = 1
    lora: Lora | None = None
    compiled: bool = False
    selective: bool = False

    def time(self, **changes: Any) -> StepTime:
        case = replace(self, **changes)
        sets = [f"max_length={case.row}", f"loss={case.loss}", "attn_implementation=flash_attention_2"]
        sets += ["torch_compile=True"] * case.compiled
        config = loading.load(case.recipe, Overrides(pairs=[("--set", text) for text in sets])).config
        config = config.with_split(case.split)
        assert config.architecture is not None
        costs = Costs(3, overlap=True) if case.gpus > 1 else Costs(0)
        counted = of_step(config, config.architecture, costs, case.gpus, lora=case.lora)
        if case.selective:
            again = config.with_split(case.split._replace(recompute=True))
            counted = half_recomputed(counted, of_step(again, config.architecture, costs, case.gpus))
        nodes = max(1, case.gpus // 8)
        sent = traffic(config, config.architecture, Machines(case.gpus // nodes, case.gpu.memory_bytes, nodes), costs)
        return step_time(costs, sent, counted, Cluster(nodes, case.gpu, case.gpus // nodes, INTERCONNECT))

    @property
    def tokens(self) -> int:
        return self.split.samples * self.row


def half_recomputed(kept: Operations, recomputed: Operations) -> Operations:
    return kept._replace(
        matmul_flops=(kept.matmul_flops + recomputed.matmul_flops) / 2,
        matmul_bytes=(kept.matmul_bytes + recomputed.matmul_bytes) / 2,
        elementwise_bytes=recomputed.elementwise_bytes,
        kernels=recomputed.kernels,
    )


LLAMA = "llama3_8b_{}_alpaca_e1"
_NEMO = Published(12_473, LLAMA.format("lora"), H100, Split(2, 16, recompute=False), 4096, lora="fused")
_TITAN = Published(
    *(5_762, LLAMA.format("full"), LIMITED_H100, Split(2, 1, recompute=False), 8192), gpus=8, selective=True
)
_TORCHTUNE = Published(
    *(3_083, LLAMA.format("lora"), RTX4090, Split(2, 1, recompute=True), 2048, "chunked"), compiled=True
)
_OWN = Published(38_403, "llama3_2_1b_full_alpaca_e1", H200, Split(4, 2, recompute=True), 2048, lora="peft")
PUBLISHED = {
    "NeMo, Llama 3 8B, LoRA": _NEMO,
    "NeMo, Qwen2.5 7B, LoRA": replace(_NEMO, tokens_s=14_110, recipe="qwen2_5_7b_lora_alpaca_e1"),
    "torchtitan, Llama 3.1 8B": _TITAN,
    "torchtitan, Llama 3.1 8B, compiled": replace(_TITAN, tokens_s=6_667, compiled=True),
    "torchtitan, Llama 3 8B, A100": replace(
        _TITAN, tokens_s=2_973, gpu=A100, gpus=64, split=Split(1, 1, recompute=False)
    ),
    "torchtune, Llama 3.1 8B, LoRA": _TORCHTUNE,
    "torchtune, Llama 3.1 8B, QLoRA": replace(_TORCHTUNE, tokens_s=2_413, recipe=LLAMA.format("qlora")),
    "this project, 1B": _OWN,
    "this project, 1B, LoRA": replace(_OWN, tokens_s=35_366, recipe="llama3_2_1b_lora_alpaca_e1"),
}
"""docs/plan.md has the address of each, and what is known of it."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_speeds_are_within_a_fifth(name: str) -> None:
    published = PUBLISHED[name]
    estimated = published.tokens / published.time().total_s

    assert 1 - OFF_BY < estimated / published.tokens_s < 1 + OFF_BY, f"{estimated:,.0f} tokens/s"


TERMS = {
    # us a token: products, attention, element-wise, LoRA, loss, dequantization, kernels, update
    "NeMo, Llama 3 8B, LoRA": (43.2, 10.9, 21.2, 7.4, 1.5, 0.0, 1.7, 0.0),
    "torchtitan, Llama 3.1 8B": (99.2, 30.4, 38.6, 0.0, 2.1, 0.0, 0.9, 3.0),
    "torchtitan, Llama 3.1 8B, compiled": (99.2, 30.4, 12.6, 0.0, 2.1, 0.0, 0.9, 3.0),
    "torchtune, Llama 3.1 8B, QLoRA": (285.0, 24.4, 29.9, 49.9, 2.1, 14.9, 5.1, 0.5),
    "this project, 1B": (13.4, 1.7, 5.0, 0.0, 1.1, 0.0, 0.9, 0.9),
}


@pytest.mark.parametrize("name", TERMS)
def test_each_term_adds_what_the_table_says(name: str) -> None:
    time = PUBLISHED[name].time()
    seconds = (*time[: StepTime._fields.index("communication_s")],)

    assert [1e6 * part / PUBLISHED[name].tokens for part in seconds] == pytest.approx(TERMS[name], abs=0.06)
    assert time.total_s == pytest.approx(sum(seconds) + time.visible_communication_s)


def test_what_a_recipe_can_change_makes_a_step_shorter_or_longer_as_it_is_known_to() -> None:
    base = replace(_NEMO, lora=None)
    with_peft, fused = (base.time(lora=how).total_s for how in ("peft", "fused"))
    small = base.time(split=Split(1, 32, recompute=False)).total_s

    assert fused < 0.95 * with_peft
    assert base.time(loss="chunked").loss_s < base.time().loss_s
    assert base.time(split=Split(2, 16, recompute=True)).total_s > 1.2 * base.time().total_s
    assert small > base.time().total_s
    # A micro-batch of a few tokens waits for the processor.
    assert base.time(row=64, split=Split(1, 1, recompute=False)).kernels_s > 0.02


def test_an_optimizer_on_the_host_takes_a_quarter_of_a_second_for_each_billion_of_the_nodes_parameters() -> None:
    offloaded, cluster = Operations(1e15, 1e14, host_updates=1e9), Cluster(1, H100, 4)

    assert step_time(Costs(2, offload_optimizer=True), Traffic(), offloaded, cluster).update_s == 1.0


def test_tokens_on_their_way_to_experts_of_another_node_share_its_network() -> None:
    sent, counted, cluster = Traffic(layer_bytes=1e9), Operations(1e15, 1e14), Cluster(2, H100, 8, network_bytes_s=1e9)

    waits = {
        size: step_time(Costs(1, expert_ranks=size), sent, counted, cluster).visible_communication_s
        for size in (2, 8, 16)
    }

    assert waits[2] == waits[8] == pytest.approx(1e9 / H100.link_bytes_s)
    assert waits[16] == pytest.approx(8 * 8 / 15)


def test_a_utilisation_that_the_user_names_takes_the_place_of_the_roofline() -> None:
    counted = Operations(989e12, 0.0, attention_flops=989e12, elementwise_bytes=1e15)
    time = step_time(Costs(0), Traffic(), counted, Cluster(1, H100, 1, utilisation=0.5))

    assert time.total_s == pytest.approx(4.0)
