"""On-policy distillation: the student writes completions, and learns the probabilities that its teacher gives them."""

from typing import ClassVar, Literal

from pydantic import NonNegativeFloat

from tuner.files import JsonObject
from tuner.recipes.schema.block import Contradictions
from tuner.recipes.schema.objective import Teacher, UnitInterval
from tuner.recipes.schema.sampling import Sampling, facts_of_prompts


class Distill(Sampling):
    """On-policy distillation: the model learns the next-token probabilities of a teacher on its own completions."""

    facts: ClassVar = facts_of_prompts("distillation", has_teacher=True, balances_router=False)
    own_keys: ClassVar = Sampling.own_keys | {
        *("teacher", "teacher_revision", "teacher_bits", "teacher_architecture", "vocabulary_matching"),
        *("uld_hybrid_matched_weight", "uld_hybrid_unmatched_weight"),
    }
    type: Literal["distill"]
    # The model to learn from: a folder, a run, or an id on the hub.
    teacher: str | None = None
    # Its commit, branch or tag on the hub. None: the main branch.
    teacher_revision: str | None = None
    # Bits of its weights: 16 is the compute type of the run, 4 is nf4 of bitsandbytes.
    teacher_bits: Literal[4, 16] = 16
    # What its config.json says; tuner reads it.
    teacher_architecture: JsonObject | None = None
    # Which divergence the loss is: 0 is the forward KL divergence, 1 the reverse one, 0.5 that of Jensen and Shannon.
    beta: UnitInterval = 1.0
    # Which probabilities are compared. 'ids': those of each token, of a teacher with the same vocabulary. Of one with
    # another vocabulary, 'hybrid': those of the tokens that both have, and the others sorted (GOLD); 'sorted': all of
    # them sorted (universal logit distillation).
    vocabulary_matching: Literal["ids", "hybrid", "sorted"] = "ids"
    # 'hybrid': the weight of the divergence over the tokens that both have. None: their share of the teacher's tokens.
    uld_hybrid_matched_weight: NonNegativeFloat | None = None
    # 'hybrid': the weight of the distance of the others. None: the rest of that share.
    uld_hybrid_unmatched_weight: NonNegativeFloat | None = None

    def contradictions(self) -> Contradictions:
        weights = ("uld_hybrid_matched_weight", "uld_hybrid_unmatched_weight")
        if self.vocabulary_matching != "hybrid":
            yield from self.unread(f"with the vocabulary_matching {self.vocabulary_matching}", *weights)
        elif len(missing := [name for name in weights if getattr(self, name) is None]) == 1:
            yield missing[0], "give both weights, or none"
        if self.vocabulary_matching == "sorted":
            yield from self.unread("with the vocabulary_matching sorted", "beta")

    @property
    def taught_by(self) -> Teacher:
        """Return the teacher."""
        return Teacher(self.teacher, self.teacher_revision, self.teacher_bits, self.vocabulary_matching == "ids")
