"""The base of every objective's block in a recipe, with the facts that plans, checks, data and ranks ask for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveInt

from tuner.recipes.schema.block import Block, Contradictions

UnitInterval = Annotated[float, Field(ge=0, le=1)]
RowKind = Literal["conversations", "texts", "pairs", "judged", "prompts"]
"""What the rows hold: conversations; plain texts or conversations; two answers to a prompt; an answer with a judgement;
prompts alone."""
NO_LOSS = "no token to train on within max_length"
EQUAL_OR_NO_LOSS = f"equal answers, or {NO_LOSS}"
"""Samples that an objective learns nothing from; see `ObjectiveFacts.dropped`."""


@dataclass(frozen=True)
class ObjectiveFacts:
    """The facts of an objective that do not depend on its settings.

    Args:
        title: How people write it.
        rows: What its rows hold.
        dropped: The samples that it learns nothing from.
        is_usual: Lists begin with it among those with such rows, and it is suggested for them.
        packs: Its loss is a mean over tokens, so samples may share a row; an adapter keeps its dropout.
        answers_prompts: Its rows have prompts that the trained model can answer.
        cuts: A sample that is too long is cut at max_length; otherwise it is dropped.
        scores: The model gets a head that scores an answer, and no logits.
        has_reference: It compares the model with a frozen copy.
        has_teacher: It compares the model with another one, which has to be named.
        can_chunk_logits: Its loss can be computed from chunks of the logits, so `train_cfg.loss` chooses.
        logit_copies: Whole copies of the logits at the peak of the backward pass, in the compute type, where TRL keeps
            all logits until then; 0: it does not.
        balances_router: The loss that balances the router of a mixture of experts is added to its own.
        offloads_activations: TRL can move its activations to the host.
        generates: Training generates completions.
        drops_correction: TRL's trainer has GRPO's arguments, and leaves out the correction of the loss for vLLM's
            probabilities.
    """

    title: str
    rows: RowKind
    dropped: str
    is_usual: bool = False
    packs: bool = False
    answers_prompts: bool = True
    cuts: bool = True
    scores: bool = False
    has_reference: bool = False
    has_teacher: bool = False
    can_chunk_logits: bool = False
    logit_copies: float = 0
    balances_router: bool = True
    offloads_activations: bool = True
    generates: bool = False
    drops_correction: bool = False

    @property
    def keeps_logits(self) -> bool:
        """Whether TRL keeps all logits in the compute type until the backward pass."""
        return self.logit_copies > 0

    @property
    def computes_logits_once(self) -> bool:
        """Whether its loss in chunks computes each logit once: a mean over tokens has one gradient for all of them."""
        return self.packs and self.can_chunk_logits

    @property
    def reads_head(self) -> bool:
        """Whether TRL computes its loss with the weight of the output embeddings, past an adapter on them."""
        return not (self.scores or self.keeps_logits)

    @property
    def is_judged(self) -> bool:
        """Whether its rows hold judged answers."""
        return self.rows in ("pairs", "judged")

    @property
    def sequences_per_sample(self) -> int:
        """The sequences that the model reads for one sample."""
        return 2 if self.rows == "pairs" else 1


@dataclass(frozen=True)
class Teacher:
    """A frozen model of its own that an objective learns from.

    Args:
        path: A folder or an id on the hub; None if the recipe names no teacher.
        revision: The commit, branch or tag on the hub.
        bits: Of a weight: 16, or 4 of bitsandbytes.
        shares_vocabulary: Its tokens must be those of the trained model.
    """

    path: str | None
    revision: str | None
    bits: int
    shares_vocabulary: bool = True


class Generation(Block):
    """The program that generates, and where it runs. What belongs to vLLM is refused with another program."""

    # 'transformers': the ranks that train generate. 'vllm': vLLM does, on the GPUs of the ranks or as a server.
    engine: Literal["transformers", "vllm"] = "transformers"
    # The address of a server of vLLM, such as 'http://node-1:8000'. None: vLLM shares the GPUs of the ranks.
    server: str | None = None
    # The port of the rank that leads, over which the server gets the trained weights.
    group_port: Annotated[int, Field(ge=1, le=65_535)] = 51_216
    # The part of each GPU's memory that vLLM takes where it shares the GPUs.
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.3
    # Ranks that share one copy of the model in vLLM.
    tensor_parallel_size: PositiveInt = 1
    # vLLM frees its memory while the model trains, and gets the weights again before it generates.
    enable_sleep_mode: bool = False

    def contradictions(self) -> Contradictions:
        of_gpus = ("gpu_memory_utilization", "tensor_parallel_size", "enable_sleep_mode")
        if self.server is not None and not self.server.startswith(("http://", "https://")):
            yield "server", "write the address of the server with its protocol and port: 'http://node-1:8000'"
        if self.engine == "transformers":
            yield from self.unread("with the engine transformers", "server", "group_port", *of_gpus)
        elif self.server is None:
            yield from self.unread("without a server", "group_port")
        else:
            yield from self.unread("where vLLM runs as a server", *of_gpus)

    @property
    def shares_gpus(self) -> bool:
        """Whether vLLM runs on the GPUs of the ranks."""
        return self.engine == "vllm" and self.server is None

    @property
    def held_share(self) -> float:
        """The part of each GPU's memory that vLLM holds while the model trains."""
        return self.gpu_memory_utilization if self.shares_gpus and not self.enable_sleep_mode else 0.0


class Objective(Block):
    """The block `objective` of a recipe, in TRL's names for its settings."""

    facts: ClassVar[ObjectiveFacts]
    own_keys: ClassVar[frozenset[str]] = frozenset({"type"})
    """The keys that are no arguments of TRL."""
    lacks: ClassVar[Mapping[str, str]] = {}
    """Keys of other objectives -> why this one does not have them, where that is no matter of course."""
    type: str

    @property
    def logit_copies(self) -> float:
        """Whole copies of the logits at the peak of the backward pass; see `ObjectiveFacts`."""
        return self.facts.logit_copies

    @property
    def least_batch_size(self) -> int:
        """The smallest micro-batch that the loss is defined for."""
        return 1

    def micro_batches(self, max_size: int) -> range:
        """Return the sizes of a micro-batch, up to `max_size`, that the loss is defined for."""
        return range(self.least_batch_size, max_size + 1)

    @property
    def own_functions(self) -> Mapping[str, tuple[str, ...]]:
        """The user's code that it calls, 'file.py:function' or 'package.module:function', by its key."""
        return {}

    @property
    def samples_a_row(self) -> int:
        """The samples that a row becomes: 1, or the completions that are generated of a prompt."""
        return 1

    @property
    def scoring_models(self) -> tuple[Mapping[str, object], ...]:
        """What config.json says of each reward model of known architecture; every rank loads them."""
        return ()

    @property
    def generated_by(self) -> Generation | None:
        """The program that writes the completions of training; None without generation."""
        return None

    @property
    def completion_tokens(self) -> int:
        """The most tokens that the model generates after a prompt of training; 0 without generation."""
        return 0

    @property
    def prompt_tokens(self) -> int:
        """The most tokens that are added to a prompt of a row while the run trains."""
        return 0

    def generated_at_once(self, global_batch: int) -> int:
        """Return the samples that all ranks prepare before they take steps on them: those of a step."""
        return global_batch

    def steps_per_generation(self, global_batch: int) -> int:
        """Return the optimizer steps that are taken on the same samples, or on those that were generated at once."""
        return 1

    @property
    def depends_on_micro_batch(self) -> bool:
        """Whether the loss of a sample depends on the others of its micro-batch, so that its size changes training.

        The docstring of an objective's own says when and why: the table of docs/recipes.md shows it.
        """
        return False

    @property
    def depends_on_ranks(self) -> bool:
        """Whether it also depends on the micro-batches of the other ranks, so that their number changes training.

        The docstring of an objective's own is in that table too.
        """
        return False

    @property
    def weighs_by_probability(self) -> bool:
        """Whether a token's gradient is times the probability that the model gives it (dynamic fine-tuning)."""
        return False

    @property
    def loads_reference(self) -> bool:
        """Whether the reference model is in memory while the run trains."""
        return self.facts.has_reference

    def without_training(self) -> Self:
        """Return the block for a trainer that only measures: without what only training needs."""
        return self

    @property
    def taught_by(self) -> Teacher | None:
        """Return the teacher; None if the objective has none."""
        return None
