"""The simulation of a step holds what real ranks hold, and takes the kernels that a GPU takes."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from bench import simulation
from bench.live import Live
from bench.simulation import simulate
from tests.bench.small_jobs import JOBS, RANKS
from tests.e2e.runs import environment
from tests.e2e.warm import of_module, warm
from tuner.lab import compat_meta_tensors
from tuner.lab.compat_meta_tensors import META, GpuKernels, Memory


def real_peaks(names: tuple[str, ...], folder: Path) -> list[dict[str, int]]:
    """Train jobs on the CPU, on two ranks; return the peaks of each rank."""
    code = of_module("tests.bench.real_rank", ranks=RANKS)
    done = warm(has_bitsandbytes=True).run([folder / "peaks", *names], code=code, env=environment(DS_ACCELERATOR="cpu"))
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"peaks.{rank}").read_text(encoding="utf-8")) for rank in range(RANKS)]


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")  # PEFT's, of fused experts
@pytest.mark.long
@pytest.mark.parametrize("names", [tuple(JOBS)], ids=["all"])
def test_the_peak_is_that_of_real_ranks(names: tuple[str, ...], tmp_path: Path) -> None:
    peaks = real_peaks(names, tmp_path)

    # Each job on one of the ranks, in turn: they differ in the padding of a part alone.
    of_rank = {name: at % RANKS for at, name in enumerate(names)}
    simulated = {name: simulate(replace(JOBS[name], rank=rank)).peak for name, rank in of_rank.items()}
    assert simulated == {name: pytest.approx(peaks[rank][name], rel=2e-3) for name, rank in of_rank.items()}


def test_the_lines_add_up_to_the_peak() -> None:
    found = simulate(JOBS["lora at 2"])

    assert sum(found.lines.values()) == found.peak
    assert {"weights", "optimizer_states", "forward: layers"} <= found.lines.keys()


def modules_of(file: str) -> set[str]:
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    modules = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return modules | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}


def test_it_takes_nothing_from_what_it_checks() -> None:
    ours = {name for name in modules_of(simulation.__file__) if name.startswith("tuner")}
    of_ranks = {
        f"tuner.models.{name}" for name in ("attention", "compat", "compat_experts", "load", "mixers", "vision")
    }
    of_schema = {"tuner.recipes.schema", "tuner.recipes.schema.architecture"}
    of_worker = {"tuner.worker.compat", "tuner.worker.loss"}
    assert ours == {*of_ranks, *of_schema, *of_worker, "tuner.lab.compat_meta_tensors"}
    assert [name for name in modules_of(compat_meta_tensors.__file__) if name.startswith("tuner")] == []


def held_by_attention(capability: tuple[int, int], *, groups: int = 8, has_mask: bool = False) -> int:
    """Return the bytes that attention of 8 heads, 128 tokens and 16 numbers a head keeps for its backward."""
    memory = Memory()
    with memory, GpuKernels(memory, capability):
        query = torch.empty(1, 8, 128, 16, dtype=torch.float16, device=META, requires_grad=True)
        key, value = (torch.empty(1, groups, 128, 16, dtype=query.dtype, device=META) for _ in range(2))
        mask = torch.empty(1, 1, 128, 128, dtype=torch.bool, device=META) if has_mask else None
        before = memory.now
        result = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=groups < 8
        )
        kept = memory.now - before
        del result
    return kept


def test_attention_takes_the_kernel_that_the_gpu_has() -> None:
    output, scores, random_state = 8 * 128 * 16 * 2, 8 * 128 * 128 * 2, 64
    output += 8 * 128 * 4  # and the logarithms of its rows' sums

    assert held_by_attention((8, 0)) == pytest.approx(output, abs=random_state)
    assert held_by_attention((8, 0), groups=2) == pytest.approx(output, abs=random_state)
    assert held_by_attention((8, 0), has_mask=True) == pytest.approx(output + 128 * 128 * 2, abs=random_state)
    assert held_by_attention((7, 5)) == pytest.approx(output, abs=random_state)
    assert held_by_attention((7, 5), groups=2) > output + scores, "no kernel takes grouped heads there"


def used_twice(device: str, *, has_views: bool) -> tuple[int, torch.Tensor]:
    """Return the bytes at the peak of a backward pass in which a weight gets two gradients, and its gradient."""
    memory = Memory() if device == META else Live()
    with memory:
        weight = torch.ones(64, 512, device=device, requires_grad=True)
        loss = (weight * 3).sum() + ((weight.t() if has_views else weight) * 2).sum()
        before = memory.now
        memory.peak = before
        loss.backward()
        assert weight.grad is not None
        return memory.peak - before, weight.grad


@pytest.mark.parametrize("device", [META, "cpu"])
def test_a_gradient_is_added_in_place_where_it_is_without_anything_that_counts(device: str) -> None:
    peak, gradient = used_twice(device, has_views=False)
    of_views, _ = used_twice(device, has_views=True)

    size = 64 * 512 * 4
    assert of_views - peak == size
    if device == "cpu":
        assert gradient.eq(3 + 2).all()


def test_tensors_of_the_host_are_not_counted() -> None:
    memory = Memory()
    with memory, GpuKernels(memory, (8, 0)):
        on_gpu = torch.empty(10_000, device=META)
        on_host = on_gpu.to("cpu")
        also_on_host = on_host + 1

        assert memory.now == 40_000
        assert memory.is_on_host(also_on_host) and also_on_host.device == torch.device("cpu")

        back = also_on_host.to(META)
        assert memory.now == 80_000
        del back, on_gpu

    assert memory.now == 0
    assert memory.peak == 80_000
