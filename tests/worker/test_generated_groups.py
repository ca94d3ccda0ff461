"""Completions of prompts: which rank generates them, and from which random numbers."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from tuner.worker.objectives.generated_groups import Numbered, PromptBatches, Sampled, seed_of


def batches(num_rows: int, prompts: int, generations: int, ranks: int, epoch: int = 0) -> list[list[list[Numbered]]]:
    """Return the batches of each rank."""
    made = []
    for rank in range(ranks):
        of_rank = prompts * generations // ranks
        one = PromptBatches(
            num_rows, of_rank=of_rank, rank=rank, ranks=ranks, generations=generations, repeats=1, seed=1
        )
        one.set_epoch(epoch)
        made.append(list(one))
        assert len(made[-1]) == len(one)
    return made


@given(some.integers(1, 30), some.integers(1, 6), some.integers(2, 8), some.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_every_prompt_of_an_epoch_has_all_its_completions_in_one_step_on_any_number_of_ranks(
    num_rows: int, prompts: int, generations: int, ranks: int
) -> None:
    prompts *= ranks
    of_ranks = batches(num_rows, prompts, generations, ranks)
    steps = [[one for part in parts for one in part] for parts in zip(*of_ranks, strict=True)]

    assert steps == batches(num_rows, prompts, generations, 1)[0]
    assert all(len(step) == prompts * generations for step in steps)
    assert {one.row for step in steps for one in step} == set(range(num_rows))
    for step in steps:
        assert all(count % generations == 0 for count in Counter(one.row for one in step).values())
    numbers = [one.completion for step in steps for one in step]
    assert len(set(numbers)) == len(numbers), "each completion has a seed of its own"


def test_each_epoch_has_another_order_and_the_same_seed_has_the_same() -> None:
    first, again, other = (batches(20, 2, 2, 1, epoch) for epoch in (0, 0, 1))

    assert first == again != other


def test_a_token_is_sampled_with_its_probability() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draw = Sampled([seed_of(1, 0, number) for number in range(4000)], torch.device("cpu"))

    drawn = draw(torch.empty(0), probabilities.log().expand(4000, 4)).argmax(-1)

    assert torch.allclose(torch.bincount(drawn, minlength=4) / 4000, probabilities, atol=0.03)


def test_a_completion_draws_the_same_whichever_others_are_in_its_batch() -> None:
    scores = torch.zeros(3, 50)
    device = torch.device("cpu")
    whole, alone = Sampled([7, 8, 9], device), Sampled([8], device)

    for _ in range(3):
        assert torch.equal(whole(torch.empty(0), scores)[1:2], alone(torch.empty(0), scores[:1]))
