from __future__ import annotations

from tuner.machine.few_steps import MIN_STEPS, warning
from tuner.machine.topology import Batch

SIXTEEN = Batch(1, 16, 1)


def test_a_run_of_one_step_is_told_with_its_arithmetic_and_what_gives_more() -> None:
    told = warning(SIXTEEN, 1, 9, "135 samples packed into 9 rows of 2,048 tokens", warmup_ratio=0.03, unpacked=135)

    assert told == (
        "135 samples packed into 9 rows of 2,048 tokens, global batch 16, 1 epoch: 1 optimizer step, too few to learn "
        "from; a warm-up of 3% is less than one step. More: --set accumulative_counts=1 (9 steps), or "
        "--set train_dataloader.dataset.packing=False (9 steps), or --set max_epochs=10 (10 steps)"
    )


def test_a_run_of_enough_steps_is_not_told() -> None:
    assert warning(SIXTEEN, 1, 16 * MIN_STEPS, "rows", warmup_ratio=0.03) is None
    assert warning(SIXTEEN, 1, 16 * (MIN_STEPS - 1), "rows", warmup_ratio=0.03) is not None
    assert warning(SIXTEEN, 5, 32, "rows", warmup_ratio=0.0) is None


def test_what_gives_no_more_steps_is_not_advised() -> None:
    told = warning(Batch(2, 1, 1), 2, 4, "4 samples", warmup_ratio=0.5)

    assert told == (
        "4 samples, global batch 2, 2 epochs: 4 optimizer steps, too few to learn from. "
        "More: --set max_epochs=5 (10 steps)"
    )
