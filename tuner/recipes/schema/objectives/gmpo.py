"""Geometric-mean policy optimization."""

from typing import ClassVar, Literal

from pydantic import PositiveFloat

from tuner.recipes.schema.group_policy import GroupPolicy
from tuner.recipes.schema.sampling import facts_of_prompts


class Gmpo(GroupPolicy):
    """Geometric-mean policy optimization: as GRPO, with the geometric mean of a completion's ratios, each one clipped.

    Zhao et al., 2025 (arXiv:2507.20673). Each completion weighs the same, however long it is.
    """

    # TRL 1.16's GMPOTrainer leaves out what its GRPOTrainer adds: the loss of a router, and vLLM's correction.
    facts: ClassVar = facts_of_prompts("GMPO", has_reference=True, balances_router=False, drops_correction=True)
    type: Literal["gmpo"]
    # How far the logarithm of a token's ratio may move in a pass: the ratio is clipped at e^-epsilon and at e^epsilon.
    epsilon: PositiveFloat = 0.4
    # Another upper bound, of the logarithm too. None: epsilon.
    epsilon_high: PositiveFloat | None = None
