"""What the objectives share that generate completions of prompts: how the next token is chosen."""

from functools import partial
from typing import Annotated, ClassVar, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from tuner.recipes.schema.objective import Generation, Objective, ObjectiveFacts, UnitInterval

facts_of_prompts = partial(
    ObjectiveFacts, rows="prompts", dropped="a prompt longer than max_length", cuts=False, generates=True
)
"""Makes the facts of an objective that generates: its title is missing, and what else is special about it."""


class Sampling(Objective):
    """An objective that trains on completions that the model writes itself."""

    own_keys: ClassVar = frozenset({"type", "generation"})
    # The program that writes the completions.
    generation: Generation = Generation()
    # Tokens of the longest completion; it ends there.
    max_completion_length: PositiveInt = 512
    # Higher values give more different completions.
    temperature: PositiveFloat = 1.0
    # Sample from the most likely tokens that together have this probability.
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    # Sample from this number of the most likely tokens. 0: from all.
    top_k: NonNegativeInt = 0
    # Sample from tokens that have at least this share of the most likely token's probability.
    min_p: UnitInterval | None = None
    # Above 1: tokens that occur already are less likely.
    repetition_penalty: PositiveFloat = 1.0

    @property
    def generated_by(self) -> Generation:
        """The program that writes the completions."""
        return self.generation

    def without_training(self) -> Self:
        """Return the block with transformers as the program that generates."""
        return self.model_copy(update={"generation": Generation()})

    @property
    def completion_tokens(self) -> int:
        """The most tokens of a completion."""
        return self.max_completion_length
