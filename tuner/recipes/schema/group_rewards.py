"""What the objectives share that generate completions of prompts and compare those of one prompt by their rewards."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from tuner.recipes.schema.rewards import ModelReward, OwnReward, Rewards
from tuner.recipes.schema.sampling import Sampling


class GroupRewards(Sampling):
    """An objective that learns which of several completions of a prompt are better."""

    own_keys: ClassVar = Sampling.own_keys | {"rewards"}  # functions score completions, see `rewards`
    # What scores a completion; the numbers are added up.
    rewards: Rewards
    # Completions of each prompt. They are compared with each other.
    num_generations: Annotated[int, Field(ge=2)] = 8
    # Optimizer steps on the same completions, before new ones are generated.
    num_iterations: PositiveInt = 1
    # Completions that all ranks generate at once, a multiple of the batch size: each of several steps then takes its
    # part of them. None: those of one step.
    generation_batch_size: PositiveInt | None = None
    # The weight of the distance to the reference model. 0: there is no reference model.
    beta: NonNegativeFloat = 0.0
    # How far a probability may move in a pass: it is clipped at 1 - epsilon and at 1 + epsilon.
    epsilon: PositiveFloat = 0.2
    # Another upper bound. None: epsilon.
    epsilon_high: PositiveFloat | None = None
    # Completions that reach max_completion_length carry no loss.
    mask_truncated_completions: bool = False

    @property
    def own_functions(self) -> Mapping[str, tuple[str, ...]]:
        """The rewards that are functions of the user's."""
        names = tuple(reward.type for reward in self.rewards if isinstance(reward, OwnReward))
        return {"rewards": names} if names else {}

    @property
    def scoring_models(self) -> tuple[Mapping[str, object], ...]:
        """What config.json says of each reward model of known architecture; every rank loads them."""
        models = (reward.architecture for reward in self.rewards if isinstance(reward, ModelReward))
        return tuple(model for model in models if model)

    @property
    def samples_a_row(self) -> int:
        """Return the completions of a prompt."""
        return self.num_generations

    def generated_at_once(self, global_batch: int) -> int:
        """Return the completions that all ranks generate before they take steps on them."""
        return self.generation_batch_size or global_batch

    def steps_per_generation(self, global_batch: int) -> int:
        """Return the optimizer steps that are taken before completions are generated again."""
        return self.num_iterations * (self.generated_at_once(global_batch) // global_batch)

    def without_training(self) -> Self:
        """Return the block without a reference model, and for completions of one step."""
        alone = super().without_training()
        return alone.model_copy(update={"beta": 0.0, "generation_batch_size": None, "num_iterations": 1})

    @property
    def loads_reference(self) -> bool:
        """Whether there is a reference model."""
        return self.beta > 0
