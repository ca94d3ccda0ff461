from __future__ import annotations

from tuner.machine.topology import MIN_STEPS, Batch, few_steps_warning

SIXTEEN = Batch(1, 16, 1)


def test_a_run_of_one_step_is_warned_of_with_its_arithmetic_and_what_gives_more() -> None:
    told = few_steps_warning(SIXTEEN, 1, 9, "135 samples packed into 9 rows of 2,048 tokens", unpacked=135)

    assert told == (
        "This run makes only 1 optimizer step (135 samples packed into 9 rows of 2,048 tokens, global batch 16, "
        "1 epoch) and will learn very little. Try --batch-size 1 (9 steps) or "
        "--set train_dataloader.dataset.packing=False (9 steps) or --epochs 30 (30 steps)"
    )


def test_a_run_of_enough_steps_gets_no_warning() -> None:
    assert few_steps_warning(SIXTEEN, 1, 16 * MIN_STEPS, "rows") is None
    assert few_steps_warning(SIXTEEN, 1, 16 * (MIN_STEPS - 1), "rows") is not None
    assert few_steps_warning(SIXTEEN, 15, 32, "rows") is None


def test_what_gives_no_more_steps_is_not_advised() -> None:
    told = few_steps_warning(Batch(2, 1, 1), 2, 4, "4 samples")

    assert told == (
        "This run makes only 4 optimizer steps (4 samples, global batch 2, 2 epochs) and will learn very little. "
        "Try --batch-size 1 (8 steps) or --epochs 15 (30 steps)"
    )
