"""How a step is split into micro-batches changes nothing that is learned."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import Finished, Once, ok, quick, train

pytestmark = pytest.mark.e2e


def run(recipe: Path, work_dir: Path, micro: int, accumulation: int, *sets: str) -> Finished:
    split = (f"train_dataloader.batch_size={micro}", f"accumulative_counts={accumulation}", *sets)
    return ok(train(recipe, work_dir, *(word for text in split for word in ("--set", text)), ranks=1))


@pytest.mark.long
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_every_split_of_a_global_batch_has_the_same_losses(tmp_path: Path, packing: bool) -> None:
    recipe, packed = quick(tmp_path, "full"), f"train_dataloader.dataset.packing={packing}"
    runs = [run(recipe, tmp_path / f"{size}", size, 4 // size, packed) for size in (1, 2, 4)]
    recomputed = run(recipe, tmp_path / "recomputed", 4, 1, packed, "gradient_checkpointing=True")

    # fp32 adds up a step's tokens in another order.
    for other in (*runs[1:], recomputed):
        assert len(other.losses) == 4
        assert other.losses == pytest.approx(runs[0].losses, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("method", ["rloo", "distill"])
def test_every_split_of_generated_completions_has_the_same_losses(tmp_path: Path, once: Once, method: str) -> None:
    sets = ["max_completion_length=8", "global_batch_size=8", "max_steps=3", "val_dataloader=None", "num_samples=0"]
    if method == "rloo":
        sets += ["objective.num_generations=4", "objective.rewards=['length']"]
    else:
        teacher = once(quick, "full", "--set", "max_steps=2", ranks=1)
        sets.append(f"teacher={teacher.path}")
    recipe = Path(f"tiny_{method}_full_sample_e1")
    on_one, on_four = (run(recipe, tmp_path / f"{size}", size, 8 // size, *sets) for size in (8, 2))

    for line, again in zip(on_one.metrics, on_four.metrics, strict=True):
        keys = ("loss", "grad_norm", "completion_length")
        assert [line[key] for key in keys] == pytest.approx([again[key] for key in keys], rel=1e-4, abs=1e-7)
    assert on_one.metrics[0]["grad_norm"] > 1e-3
