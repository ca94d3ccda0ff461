"""What bench/memory.py measures is what real ranks hold, and the prediction beside it is exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import memory_rank
from bench.live import Live
from bench.memory import KINDS, Case, compare, make_data, make_model, measure, planned, row
from bench.memory_rank import held, storages
from tests.machine.gpus import A100, CPU, machine

QLORA = Case("5M", "qlora", "deepspeed_zero3", "bf16")
GPU_KINDS = ("weights", "gradients", "optimizer_states", "activations", "logits", "buckets", "gathered_weights")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), "5M", "cpu")


@pytest.mark.e2e
@pytest.mark.long
def test_two_ranks_hold_to_the_byte_what_is_predicted_of_a_sharded_4_bit_base(model: Path, tmp_path: Path) -> None:
    found = measure(QLORA, model, make_data(tmp_path), tmp_path / "run", CPU)
    # bitsandbytes' tables of 16 and 256 numbers and an offset for each of 28 layers; Adam's counter of steps.
    tables, counter = 28 * (64 + 1024 + 4), 4

    assert found is not None
    assert found.measured["weights"] == found.predicted["weights"] + tables
    assert found.measured["gradients"] == found.predicted["gradients"]
    assert found.measured["optimizer_states"] == found.predicted["optimizer_states"] + counter
    assert found.off_by == tables + counter
    assert found.measured_peak > sum(found.measured[kind] for kind in KINDS), "activations and gathered weights too"


def test_on_gpus_the_allocators_peak_stands_beside_all_lines_but_context_and_fragmentation(
    model: Path, tmp_path: Path
) -> None:
    case = replace(QLORA, method="full", preset="deepspeed_zero2")
    made = planned(case, model, make_data(tmp_path), tmp_path / "run", machine(A100, A100))
    assert made.fit is not None
    expected = sum(made.fit.peak.gpu.get(kind, 0.0) for kind in (*GPU_KINDS, "step"))
    small, large = (dict.fromkeys((*KINDS, "other"), size) for size in (1, 2))
    seen = [{"held": [small, large], "peak": int(expected / 2)}, {"held": [small], "peak": int(expected / 1.1)}]

    found = compare(made, seen)

    assert found.measured == large
    assert found.predicted_peak == pytest.approx(expected)
    assert found.peak_off == pytest.approx(0.1)
    assert row(case, found).endswith("| +10.0% |")


def test_the_peak_is_of_storages_that_live_together() -> None:
    before = torch.zeros(100)
    with Live() as live:
        start = live.now
        tensor = before + 1
        view = tensor[:5]
        del tensor
        assert live.now - start == 400, "a view keeps its storage"
        del view
        two = [before + 1, before + 2]
        del two
        before.add_(1)

    assert live.now == start
    assert live.peak - start == 800


def test_a_storage_counts_once_and_under_its_first_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_rank, "modules", lambda engine: [engine.module])  # models of other tests may live on
    layer = torch.nn.Linear(8, 4, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer.weight.grad = torch.ones(4, 8)
    optimizer.step()

    found = held(SimpleNamespace(module=layer, optimizer=optimizer))

    assert {kind: found[kind] for kind in KINDS} == {
        "weights": 4 * 32,
        "gradients": 4 * 32,
        "optimizer_states": 2 * 4 * 32 + 4,
    }


def test_views_of_one_storage_count_whole_and_once() -> None:
    whole = torch.zeros(100, dtype=torch.bfloat16)

    assert list(storages([whole[:10], whole[50:], None, torch.empty(0)]).values()) == [200]
