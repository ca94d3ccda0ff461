"""How TRL's trainers of groups of completions take rewards and a reference model. Seen with TRL 1.16."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from trl.models.utils import prepare_deepspeed
from trl.trainer.utils import add_fused_lm_head

from tuner.data.text_encoder import TextEncoder
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.rewards import rewards_of
from tuner.rewards import reward_functions
from tuner.runs.verdict import REWARD
from tuner.worker import compat
from tuner.worker.objectives.completions import GeneratingTrainer, GeneratingTraining
from tuner.worker.trainer_types import MixedIn


class GroupRewardsTrainer(GeneratingTrainer):
    """Mixed into a trainer of TRL that compares the completions of a prompt by their rewards."""

    def __init__(self, *, args: Any, ref_model: Any = None, **others: Any) -> None:
        """Make TRL's trainer; it would load a reference model by itself from the path in the model's config."""
        beta, args.beta = args.beta, 0.0 if ref_model is not None else args.beta
        super().__init__(args=args, **others)
        self.num_parts = max(1, args.steps_per_generation // args.gradient_accumulation_steps)
        self.beta = args.beta = beta
        if ref_model is not None:
            add_fused_lm_head(ref_model, temperature=self.temperature)
            self.ref_model = prepare_deepspeed(ref_model, self.accelerator) if self.is_deepspeed_enabled else ref_model

    def scores_of(self, logs: Mapping[str, Any], number: int) -> dict[str, Any]:
        rewards = {name: values[number] for name, values in logs["rewards"].items()}
        rewards = {name: None if math.isnan(reward) else reward for name, reward in rewards.items()}
        return {"rewards": rewards, "advantage": logs["advantages"][number]}


class GreedyReward(MixedIn):
    """Mixed in between `GroupRewardsTrainer` and a trainer of TRL: a validation measures the reward."""

    def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> tuple[Tensor, None, None]:
        """Return minus the mean reward of one greedy completion of each prompt, which the validation calls its loss."""
        self.complete(inputs)
        reward = compat.metrics_of(self, "eval")[REWARD][-1]
        return -torch.tensor(reward).nan_to_num(), None, None  # NaN: the rewards have no opinion of these completions


class GroupRewardsTraining(GeneratingTraining):
    """The rewards come from the recipe."""

    fixed_arguments = MappingProxyType({"num_generations_eval": 1})

    def constructor(self, config: RecipeConfig, folder: Path, encoder: TextEncoder) -> dict[str, Any]:
        arguments = super().constructor(config, folder, encoder) | self.tools(config, folder, encoder)
        environment = arguments["rollouts"].scores if "rollouts" in arguments else None
        rewards = reward_functions(rewards_of(config.objective), folder=folder, environment=environment)
        return {"reward_funcs": list(rewards), **arguments}

    def tools(self, config: RecipeConfig, folder: Path, encoder: TextEncoder) -> dict[str, Any]:
        """Return what the trainer needs to call tools: `rollouts`, and more; empty without tools."""
        return {}

    def before(self, arguments: Any, config: RecipeConfig, model: Any) -> None:
        super().before(arguments, config, model)
        compat.keep_order(self.of_trl)
        arguments.reward_weights = [reward.weight for reward in rewards_of(config.objective)]
