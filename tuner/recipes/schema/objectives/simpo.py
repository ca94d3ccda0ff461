"""Simple preference optimization."""

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from tuner.recipes.schema.chosen_likelihood import ChosenLikelihood


class Simpo(ChosenLikelihood):
    """Simple preference optimization on pairs of answers, without a reference model.

    The reward of an answer is beta times the mean log-probability of its tokens, so a longer answer has no advantage.
    """

    facts: ClassVar = replace(ChosenLikelihood.facts, title="SimPO")
    type: Literal["simpo"]
    # The scale of the rewards.
    beta: PositiveFloat = 2.0
    # By how much the chosen answer's reward shall exceed the other's.
    simpo_gamma: NonNegativeFloat = 1.0
