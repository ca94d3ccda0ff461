"""What the objectives share that generate completions of prompts: how the next token is chosen."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from tuner.recipes.schema.objective import Objective, Share

DROPPED = "a prompt longer than max_length"


class Sampling(Objective):
    """An objective that trains on completions that the model writes itself."""

    # Tokens of the longest completion; it ends there.
    max_completion_length: PositiveInt = 512
    # Higher values give more different completions.
    temperature: PositiveFloat = 1.0
    # Sample from the most likely tokens that together have this probability.
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    # Sample from this number of the most likely tokens. 0: from all.
    top_k: NonNegativeInt = 0
    # Sample from tokens that have at least this share of the most likely token's probability.
    min_p: Share | None = None
    # Above 1: tokens that occur already are less likely.
    repetition_penalty: PositiveFloat = 1.0
