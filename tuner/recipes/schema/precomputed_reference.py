"""What objectives share whose reference model can judge the rows before training."""

from pydantic import PositiveInt

from tuner.recipes.schema.block import Contradictions
from tuner.recipes.schema.objective import Objective


class PrecomputedReference(Objective):
    """An objective on judged rows, whose reference model need not stay in memory."""

    # The reference model judges all rows before training and is not kept in memory.
    precompute_ref_log_probs: bool = False
    # Samples that the reference model judges at a time. None: the micro-batch.
    precompute_ref_batch_size: PositiveInt | None = None

    def contradictions(self) -> Contradictions:
        if not self.precompute_ref_log_probs:
            yield from self.unread("without precompute_ref_log_probs", "precompute_ref_batch_size")

    @property
    def loads_reference(self) -> bool:
        """Whether it judges the rows while the run trains."""
        return not self.precompute_ref_log_probs
