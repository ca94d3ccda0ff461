"""GRPO: TRL's GRPOTrainer on prompts that are prepared already."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from tuner.data.text_encoder import TextEncoder
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.tools import tools_of
from tuner.rewards.tool_calls import Rollouts
from tuner.runs.directory import RunDirectory
from tuner.worker import compat
from tuner.worker.objectives.generated_groups import GreedyReward, GroupRewardsTrainer, GroupRewardsTraining
from tuner.worker.objectives.tool_turns import ToolTurns, shorten


class Grpo(ToolTurns, GroupRewardsTrainer, GreedyReward, GRPOTrainer):  # type: ignore[misc]
    """GRPO. Its completions come from the seeds of `Sampled`.

    TRL takes two means over the tokens of a micro-batch, the loss 'bnpo' and the bonus of `entropy_coef`. Here they are
    means over the tokens of the step, so that the split of a step changes nothing.
    """

    # TRL's
    entropy_coef: float | Tensor
    loss_type: str

    _tokens_of_step: tuple[int, Tensor] = -1, torch.zeros(())
    """The number of the step, and the tokens of its completions on all ranks."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        coefficient, loss_type = self.entropy_coef, self.loss_type
        if not model.training or (loss_type != "bnpo" and not coefficient):
            return super()._compute_loss(model, inputs)
        num_batches, num_tokens = self.current_gradient_accumulation_steps, self._count_tokens()
        mean_tokens = num_tokens / (num_batches * self.accelerator.num_processes)
        self.entropy_coef = coefficient * _trained(inputs).sum() / mean_tokens
        if loss_type == "bnpo":  # 'dapo' divides by a given number of tokens, for all steps of a generation
            self.loss_type = "dapo"
            scale = self.args.steps_per_generation / num_batches
            inputs = {**inputs, "num_items_in_batch": num_tokens * scale}
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.entropy_coef, self.loss_type = coefficient, loss_type
            if coefficients := compat.metrics_of(self, "train")["entropy_coef"]:
                coefficients[-1] = coefficient

    def _count_tokens(self) -> Tensor:
        step, batches = compat.completions_of_step(self)
        if self._tokens_of_step[0] != step:
            num_tokens = sum(_trained(batch).sum() for batch in batches)
            self._tokens_of_step = step, self.accelerator.reduce(num_tokens.float(), reduction="sum").clamp(min=1)
        return self._tokens_of_step[1]


def _trained(batch: Mapping[str, Tensor]) -> Tensor:
    """Return 1 for each token of completions with loss: what the model wrote, not results of tools."""
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


class GrpoTraining(GroupRewardsTraining):
    """The model may call tools."""

    def before(self, arguments: Any, config: RecipeConfig, model: Any) -> None:
        super().before(arguments, config, model)
        if tools := tools_of(config.objective):
            compat.check_trainer(self.of_trl, "calls tools")
            arguments.max_tool_calling_iterations = tools.max_calls

    def tools(self, config: RecipeConfig, folder: Path, encoder: TextEncoder) -> dict[str, Any]:
        tools = tools_of(config.objective)
        if tools is None:
            return {}
        failures = RunDirectory(folder).tool_failures
        rollouts = Rollouts(tools, encoder.tools, failures, partial(shorten, encoder, tools.max_result_tokens))
        return {"rollouts": rollouts, "encoder": encoder}


TRAINING = GrpoTraining(Grpo, GRPOConfig)
