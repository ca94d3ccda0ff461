"""On-policy distillation: the student writes completions, and learns the probabilities that its teacher gives them."""

from typing import ClassVar, Literal

from tuner.files import JsonObject
from tuner.recipes.schema.objective import ObjectiveFacts, Teacher, UnitInterval
from tuner.recipes.schema.sampling import DROPPED, Sampling


class Distill(Sampling):
    """On-policy distillation: the model learns the next-token probabilities of a teacher on its own completions."""

    facts: ClassVar = ObjectiveFacts(
        "distillation", rows="prompts", dropped=DROPPED, cuts=False, has_teacher=True, generates=True
    )
    own_keys: ClassVar = Sampling.own_keys | {"teacher", "teacher_revision", "teacher_bits", "teacher_architecture"}
    type: Literal["distill"]
    # The model to learn from: a folder, a run, or an id on the hub. It needs the vocabulary of the trained model.
    teacher: str | None = None
    # Its commit, branch or tag on the hub. None: the main branch.
    teacher_revision: str | None = None
    # Bits of its weights: 16 is the compute type of the run, 4 is nf4 of bitsandbytes.
    teacher_bits: Literal[4, 16] = 16
    # What its config.json says; tuner reads it.
    teacher_architecture: JsonObject | None = None
    # Which divergence the loss is: 0 is the forward KL divergence, 1 the reverse one, 0.5 that of Jensen and Shannon.
    beta: UnitInterval = 1.0

    @property
    def taught_by(self) -> Teacher:
        """Return the teacher."""
        return Teacher(self.teacher, self.teacher_revision, self.teacher_bits)
