"""Supervised fine-tuning on conversations."""

from typing import ClassVar, Literal

from pydantic import PositiveFloat

from tuner.recipes.schema.objective import NO_LOSS, Objective, ObjectiveFacts


class Sft(Objective):
    """Loss on the assistant's turns."""

    facts: ClassVar = ObjectiveFacts(
        "SFT", rows="conversations", dropped=NO_LOSS, is_usual=True, packs=True, can_chunk_logits=True
    )
    own_keys: ClassVar = Objective.own_keys | {"loss_type", "neftune_noise_alpha"}
    type: Literal["sft"]
    # 'nll': the negative log-likelihood. 'dft' (arXiv 2508.05629): a token's gradient is times the probability that the
    # model gives it, so rare tokens do not pull hardest. Losses are logged as for 'nll'.
    loss_type: Literal["nll", "dft"] = "nll"
    # NEFTune (arXiv 2310.05914): noise on the embeddings in training, up to this / sqrt(tokens of the sample * width).
    # 5 is usual. None: no noise.
    neftune_noise_alpha: PositiveFloat | None = None

    @property
    def weighs_by_probability(self) -> bool:
        return self.loss_type == "dft"
