"""Online DPO: TRL's GRPOTrainer on prompts that are prepared already, with DPO's loss on two completions of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.objectives.online_dpo import OnlineDpo as OnlineDpoBlock
from tuner.worker import compat
from tuner.worker.objectives.generated_groups import GreedyReward, GroupRewardsTrainer, GroupRewardsTraining


class OnlineDpo(GroupRewardsTrainer, GreedyReward, GRPOTrainer):  # type: ignore[misc]
    """Online DPO. Its completions come from the seeds of `Sampled`, two of each prompt one after the other."""

    # TRL's
    beta: float
    router_aux_loss_coef: float

    is_ipo = False

    def _compute_loss(self, model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss of the pairs of a micro-batch; one of equal rewards has none."""
        mask_BC = inputs["completion_mask"]
        log_probs_BC, entropies_BC, aux_loss = compat.log_probs_of_completions(self, model, inputs)
        ratios_BC = (log_probs_BC - inputs["ref_per_token_logps"]) * mask_BC
        winner_P = -inputs["advantages"].view(-1, 2).diff().nan_to_num().sign().flatten()  # 1: the first; 0: no winner
        sums_B = ratios_BC.sum(-1)
        means_B = sums_B / mask_BC.sum(-1).clamp(min=1)  # of tokens, as in TRL's DPOTrainer: sums grow with the length
        of_sums_P, of_means_P = (winner_P * -ratios_B.view(-1, 2).diff().flatten() for ratios_B in (sums_B, means_B))
        margins_P = of_means_P if self.is_ipo else of_sums_P
        losses_P = (margins_P - 1 / (2 * self.beta)) ** 2 if self.is_ipo else -F.logsigmoid(self.beta * margins_P)
        loss = (losses_P * winner_P.abs()).mean()
        distances_BC = (-ratios_BC.detach()).exp() + ratios_BC.detach() - 1  # as in GRPO
        self._note(self.beta * of_sums_P.detach()[winner_P != 0], mask_BC, entropies_BC, distances_BC)
        if aux_loss is not None:
            loss = loss + self.router_aux_loss_coef * aux_loss
        return loss / self.current_gradient_accumulation_steps

    def _note(self, margins_P: Tensor, mask_BC: Tensor, entropies_BC: Tensor, distances_BC: Tensor) -> None:
        """Log the metrics of DPO over the pairs with a winner of all ranks, and those of GRPO over tokens."""
        of_pairs = [margins_P.new_tensor(float(len(margins_P))), margins_P.sum(), (margins_P > 0).sum()]
        of_tokens = [mask_BC.sum(), (entropies_BC * mask_BC).sum(), distances_BC.sum()]
        sums_6 = torch.stack([total.float() for total in (*of_pairs, *of_tokens)])
        num_pairs, margin, num_right, num_tokens, entropy, distance = self.accelerator.reduce(sums_6).tolist()
        metrics = compat.metrics_of(self, "train" if self.model.training else "eval")
        metrics["entropy"].append(entropy / max(num_tokens, 1))
        metrics["kl"].append(distance / max(num_tokens, 1))
        if num_pairs:
            metrics["rewards/margins"].append(margin / num_pairs)
            metrics["rewards/accuracies"].append(num_right / num_pairs)


class OnlineDpoTraining(GroupRewardsTraining):
    """The loss is chosen when the trainer is built."""

    def after(self, built: Any, config: RecipeConfig) -> None:
        super().after(built, config)
        assert isinstance(config.objective, OnlineDpoBlock), "the objective's own"
        built.is_ipo = config.objective.loss_type == "ipo"


TRAINING = OnlineDpoTraining(OnlineDpo, GRPOConfig, scale_rewards="none")
