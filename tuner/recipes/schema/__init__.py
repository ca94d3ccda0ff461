"""The schema of a recipe: every key with its type and range, as a tree of pydantic models.

Values and defaults stand in `configs/base.py`; a field has a default here only inside a block that may be None.
"""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple, Union

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
)

from tuner.errors import Option, RunDirectoryError
from tuner.files import JsonObject
from tuner.optimizers import OPTIMIZERS, REMOVED, OptimizerFacts, unsuited
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.block import Block, Contradictions, Fraction, Lax
from tuner.recipes.schema.objectives import OBJECTIVES, AnyObjective, blocks_of, takes_images

LOADERS = ("train_dataloader", "val_dataloader")
"""The keys of a recipe that read rows."""
GLOBAL_BATCH = "train_cfg.global_batch_size"
PREFETCHED = 2
"""Micro-batches that a dataloader reads ahead for each of its processes (torch's prefetch_factor)."""
SCHEMA_VERSION = 1
"""Version of recipe.json. It goes up when a key changes its meaning or is removed."""


VisionPart = Literal["vision", "projector", "language"]
"""The parts of a vision-language model: what reads the pixels, what turns its output into embeddings, and the LLM."""
AnyPart = VisionPart | Literal["sound"]
"""The parts of a model that reads images, and what reads sound: no data has any, so it is never trained."""


class Vision(Block):
    """A vision tower that is joined to the LLM in model.path: together they are a LLaVA."""

    # The tower: a folder with a CLIP model, or an id on the hub.
    path: str
    # A branch, tag or commit of a hub id. None: the newest.
    revision: str | None = None
    # The run or folder of a LLaVA, in the layout of transformers, LLaVA or XTuner, that the projector is taken from.
    # None: a new projector.
    projector: str | None = None
    # The layer of the tower that the projector reads: -2 is the last but one.
    feature_layer: int = -2
    # Pad an image to a square before it is resized. False: its middle is cut out.
    pad_to_square: bool = False
    # The seed of a new projector.
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0


class VisionLora(Block):
    """LoRA on a model's vision tower while its other parts are trained whole, in PEFT's names."""

    # The rank of the two matrices of each linear layer of the tower.
    r: PositiveInt
    # The update is scaled by lora_alpha / r.
    lora_alpha: PositiveInt
    # The part of the inputs of the matrices that is dropped in training.
    lora_dropout: Fraction = 0.0


class Model(Block):
    """The weights to start from."""

    path: str | None
    revision: str | None
    chat_template: str | None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None
    attn_implementation: str | None
    use_liger_kernel: bool | Literal["auto"]
    packs_with: str | None
    trust_remote_code: bool
    remote_code: bool
    resize_embeddings: bool
    router_aux_loss_coef: NonNegativeFloat | None
    images: bool | Literal["auto"]
    vision: Vision | None
    freeze: Annotated[tuple[VisionPart, ...], Lax]
    vision_lora: VisionLora | None

    def contradictions(self) -> Contradictions:
        if self.vision_lora and self.images is False:
            yield "vision_lora", "has no effect on a model that reads text alone; use None"
        if self.vision_lora and "vision" in self.freeze:
            yield "vision_lora", "trains the tower, which model.freeze keeps as it is; use one of them"
        if self.vision and self.images is False:
            yield "vision", "joins a vision tower to the LLM, which then reads images; use None, or images=True"
        if self.freeze and self.images is False:
            yield "freeze", "has no effect on a model that reads text alone; use ()"


class Quantization(Block):
    """bitsandbytes' storage of the frozen base weights."""

    # Bits of a frozen weight.
    bits: Literal[4, 8] = 4
    # How 4 bits stand for numbers: 'nf4' suits weights that are normally distributed.
    quant_type: Literal["nf4", "fp4"] = "nf4"
    # Quantize the scales too, which saves about 0.4 bits a weight.
    double_quant: bool = True
    # Of a mixture of experts, quantize the experts too; with 8 bits they keep 16.
    experts: bool = False

    @property
    def packs_experts(self) -> bool:
        """Whether fused experts are stored in 4 bits, where the model has some."""
        return self.experts and self.bits == 4

    def contradictions(self) -> Contradictions:
        if self.bits == 8:
            yield from self.unread("with 8 bits", "quant_type", "double_quant")


TEACHERS = Quantization(experts=True)
"""How a teacher in 4 bits is stored."""

INITS = ("True", "'gaussian'", "'orthogonal'", "'olora'", "'pissa'", "'pissa_niter_N'")
"""The values of adapter.init_lora_weights: how an adapter begins, in PEFT's words."""
UNUSED_INITS = {
    "eva": "eva needs the data's activations, and so a pass before training; use 'pissa'",
    "corda": "corda needs the data's activations, and so a pass before training; use 'pissa'",
    "lora_ga": "lora_ga needs the data's gradients, and so a pass before training; use 'pissa'",
    "loftq": "loftq quantizes the weights itself instead of bitsandbytes; use True, or 'pissa' on 16 bits",
    "mica": "mica freezes one half of each adapter, which checkpoints do not save; use 'pissa'",
}
"""PEFT's other values, each with the reason why it is refused."""


class Adapter(Block):
    """PEFT's LoraConfig, in its own names; `path` is a trained adapter to continue, which sets the other values."""

    # A trained adapter to continue, with its own r, lora_alpha and target_modules. None: a new adapter.
    path: str | None = None
    # The rank of the two matrices of each layer.
    r: PositiveInt
    # The update is scaled by lora_alpha / r.
    lora_alpha: PositiveInt
    # The part of an adapter's inputs that is dropped in training.
    lora_dropout: Fraction = 0.0
    # The layers that get an adapter: 'all-linear', names such as ['q_proj', 'v_proj'], or a regular expression.
    target_modules: str | list[str] | tuple[str, ...] = "all-linear"
    # A vision-language model's vision tower and projector get adapters too.
    vision: bool = False
    # The rank of those adapters. None: r.
    vision_r: PositiveInt | None = None
    # Their update is scaled by vision_lora_alpha / vision_r. None: lora_alpha.
    vision_lora_alpha: PositiveInt | None = None
    # DoRA: train the length of each weight vector besides its direction.
    use_dora: bool = False
    # rsLoRA: scale the update by lora_alpha / sqrt(r).
    use_rslora: bool = False
    # Layers that are trained whole and saved with the adapter, such as ['embed_tokens', 'lm_head'].
    modules_to_save: list[str] | None = None
    # How a new adapter begins: True, 'gaussian', 'orthogonal', 'olora', 'pissa' or 'pissa_niter_N'.
    init_lora_weights: bool | str = True

    @property
    def changes_base(self) -> bool:
        """Whether the adapter starts as a part of the base weights, which PEFT subtracts from them."""
        return self.path is None and str(self.init_lora_weights).startswith(("pissa", "olora"))

    @field_validator("target_modules")
    @classmethod
    def _names_are_a_list(cls, names: str | list[str] | tuple[str, ...]) -> str | list[str] | tuple[str, ...]:
        """Return 'q_proj' and 'q_proj,v_proj' as lists: as regular expressions for whole names they fit no layer."""
        is_list = isinstance(names, str) and re.fullmatch(r"\w+(\s*,\s*\w+)*", names)
        if isinstance(names, str):
            try:
                re.compile(names)
            except re.error as error:
                raise ValueError(
                    f"is no regular expression ({error}); write a list of names, or 'all-linear'"
                ) from None
        return re.findall(r"\w+", str(names)) if is_list else names

    def contradictions(self) -> Contradictions:
        for key in ("vision_r", "vision_lora_alpha"):
            if getattr(self, key) and not self.vision:
                yield key, "belongs to adapters on the tower and the projector; set adapter.vision=True, or None"
        init = self.init_lora_weights
        if why := UNUSED_INITS.get(str(init).lower()):
            yield "init_lora_weights", why
        elif not (init is True or re.fullmatch(r"gaussian|orthogonal|olora|pissa(_niter_\d+)?", str(init))):
            yield "init_lora_weights", f"is {init!r}, and must be one of {', '.join(INITS)}"
        elif self.use_dora and str(init).startswith(("pissa", "olora")):
            yield "init_lora_weights", f"{init} changes the base's weights, whose norms DoRA scales by; use one of them"


class Rows(Block):
    """Where rows are, and how each is read."""

    path: str | None
    name: str | None = None
    split: str = "train"
    format: str | None = None
    columns: dict[str, str] | None = None
    system: str | None = None
    image_folder: str | None = None


class MixtureEntry(Rows):
    """One data set of a mixture; weight 0.5 takes every second row of it, 2 takes each row twice.

    Of its rows only the first `max_rows` count; None: all.
    """

    weight: PositiveFloat = 1.0
    max_rows: PositiveInt | None = None

    @model_serializer(mode="wrap")
    def _written_keys(self, dump: SerializerFunctionWrapHandler) -> JsonObject:
        """Leave out the keys that were not written."""
        return {key: value for key, value in dump(self).items() if key in self.model_fields_set}


OF_ONE_DATA_SET = tuple(key for key in Rows.model_fields if key not in ("path", "split"))
"""Keys that another data set does not keep. It keeps `split`: nearly all data sets have 'train'."""


def one_data_set(path: str | None) -> JsonObject:
    """Return the values with which a `dataset` block reads only the data set at `path`; None for a mixture."""
    return {**dict.fromkeys((*OF_ONE_DATA_SET, "mixture", "max_rows")), "path": path, "split": "train"}


class Dataset(Rows):
    """Rows and how they become samples; max_length in tokens.

    A part `val_split` of the rows, chosen by `val_seed`, is held out ('auto': `launch.validation_rows` chooses
    the part); `held_out` reads this part instead of the rest.
    """

    mixture: Annotated[tuple[MixtureEntry, ...], Lax, Field(min_length=1)] | None = None
    max_rows: PositiveInt | None = None
    val_split: Annotated[float, Field(gt=0, lt=1)] | Literal["auto"] | None = None
    val_seed: NonNegativeInt | None = None
    val_copies: Literal["together", "apart"] | None = None
    held_out: bool = False
    bad_rows: NonNegativeInt = 0
    max_length: PositiveInt
    packing: bool
    pack_length: PositiveInt | Literal["auto"] | None = None
    num_proc: PositiveInt | Literal["auto"] = "auto"
    tokenizer_backend: Literal["auto", "tokenizers"] = "auto"
    thinking: Literal["keep", "strip", "last"] | None = None
    special_tokens: bool = False
    trained_turns: Literal["all", "last", "marked", "everything"] = "all"
    streaming: bool | PositiveInt = False
    image_max_pixels: PositiveInt | None = None
    image_min_pixels: PositiveInt | None = None

    def contradictions(self) -> Contradictions:
        if self.streaming and self.mixture:
            yield "streaming", "a stream reads one data set, not a mixture; join the files, or set streaming=False"
        if self.streaming and self.val_split and not self.held_out:
            yield "streaming", f"no rows of a stream are held out; validate on another file: {Option('val', 'FILE')}"

    @property
    def pack_tokens(self) -> int:
        """The number of tokens of a full packed row; a longer sample gets its own row, up to max_length."""
        return min(self.pack_length, self.max_length) if isinstance(self.pack_length, int) else self.max_length

    @property
    def data_sets(self) -> tuple[Rows, ...]:
        """The data sets to read: those of the mixture, or this one alone."""
        return self.mixture or (self,)

    def first_alike(self, number: int) -> int:
        """Return the number of the first data set that reads the same rows as this one."""
        rows_of = [(data_set.path, data_set.name, data_set.split) for data_set in self.data_sets]
        return rows_of.index(rows_of[number])


class Dataloader(Block):
    """Samples into micro-batches, per process."""

    batch_size: PositiveInt | Literal["auto"]
    num_workers: NonNegativeInt = 0
    dataset: Dataset

    @property
    def micro_batch(self) -> int:
        """`batch_size` as a number; `launch.batch_size` must have set it."""
        assert self.batch_size != "auto", "launch.batch_size sets it first"
        return self.batch_size


if TYPE_CHECKING:
    OptimizerType = str  # mypy knows no Literal of a table's keys
else:
    OptimizerType = Literal[tuple(OPTIMIZERS)]
_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
"""Other dtype names, of torch and of older configs -> tuner's."""


def _short_dtype(name: object) -> object:
    return _DTYPES.get(name.removeprefix("torch."), name) if isinstance(name, str) else name


def _suits_zero(name: object) -> object:
    if str(name).lower() in REMOVED:
        raise ValueError(f"{name!r} no longer exists: the 1-bit optimizers were removed from DeepSpeed; use AdamW")
    if why := unsuited(name):
        raise ValueError(f"{name!r} does not suit ZeRO: {why}; use AdamW, or AdamW8bit for less memory")
    return name


class Optimizer(Block):
    """One optimizer by its class name; lr per optimizer step.

    `muon_lr` is the rate of Muon's matrices, and `lr` then that of all other weights; `loraplus_lr_ratio` is PEFT's.
    """

    type: Annotated[OptimizerType, BeforeValidator(_suits_zero)]
    lr: PositiveFloat
    betas: Annotated[tuple[Fraction, Fraction], Lax]
    eps: PositiveFloat
    weight_decay: NonNegativeFloat
    muon_lr: PositiveFloat | None
    loraplus_lr_ratio: Annotated[float, Field(ge=1)] | None
    projector_lr: PositiveFloat | None

    @property
    def facts(self) -> OptimizerFacts:
        """What depends on which optimizer it is."""
        return OPTIMIZERS[self.type]

    def contradictions(self) -> Contradictions:
        is_deepspeeds = self.facts.library == "DeepSpeed"
        if self.projector_lr and (is_deepspeeds or self.loraplus_lr_ratio):
            why = f"optimizer.type {self.type} has no rate for a projector here; use AdamW without LoRA+"
            yield "projector_lr", why
        if self.muon_lr and self.type != "Muon":
            why = f"optimizer.type {self.type} has one learning rate for all weights; use Muon, or muon_lr=None"
            yield "muon_lr", why
        if self.loraplus_lr_ratio and is_deepspeeds:
            why = f"optimizer.type {self.type} is DeepSpeed's, which does not support LoRA+; use AdamW"
            yield "loraplus_lr_ratio", why


class ClipGrad(Block):
    """The largest 2-norm of the gradient."""

    max_norm: PositiveFloat


class OptimWrapper(Block):
    """The optimizer step."""

    optimizer: Optimizer
    clip_grad: ClipGrad | None
    accumulative_counts: PositiveInt | Literal["auto"]
    dtype: Annotated[Literal["auto", "bf16", "fp16", "fp32"], BeforeValidator(_short_dtype)]


ScheduleType = Literal[
    "cosine", "linear", "constant", "cosine_with_restarts", "polynomial", "inverse_sqrt", "warmup_stable_decay"
]  # fmt: skip
FLOORED = ("cosine", "warmup_stable_decay")
"""Schedules that may end above 0."""


class ParamScheduler(Block):
    """How the learning rate changes over all optimizer steps."""

    type: ScheduleType
    warmup_ratio: Fraction
    warmup_steps: NonNegativeInt | None
    min_lr_ratio: Fraction
    decay_ratio: Annotated[float, Field(gt=0, le=1)] | None
    decay_type: Literal["cosine", "linear", "1-sqrt"]
    num_cycles: Annotated[int, Field(ge=2)] | None
    UNUSED: ClassVar = {"min_lr_ratio": 0.0, "decay_ratio": None, "decay_type": "cosine", "num_cycles": None}
    """The keys that belong to some types alone, with the values that every type takes."""

    def contradictions(self) -> Contradictions:
        if self.warmup_steps is not None and self.warmup_ratio:
            yield "warmup_steps", f"is set, and warmup_ratio is {self.warmup_ratio:g}; use one of them"
        if self.min_lr_ratio and self.type not in FLOORED:
            yield "min_lr_ratio", f"belongs to {' and '.join(FLOORED)}, and the type is {self.type}; use 0.0"
        for key, owner, usual in (
            ("decay_ratio", "warmup_stable_decay", "the last part of the steps, such as 0.1"),
            ("num_cycles", "cosine_with_restarts", "2 or more; with one cycle it is cosine"),
        ):
            value = getattr(self, key)
            if value is None and self.type == owner:
                yield key, f"is needed by {owner}: {usual}"
            elif value is not None and self.type != owner:
                yield key, f"belongs to {owner}, and the type is {self.type}; use None"
        if self.decay_type != "cosine" and self.type != "warmup_stable_decay":
            yield "decay_type", f"belongs to warmup_stable_decay, and the type is {self.type}; use cosine"
        if self.decay_ratio and self.warmup_ratio + self.decay_ratio > 1:
            yield "decay_ratio", f"and warmup_ratio, {self.warmup_ratio:g}, are more than all steps; use less of them"

    @property
    def options(self) -> dict[str, float | str]:
        """The options of transformers' schedule; a float in `num_decay_steps` is a share of all steps."""
        if self.type == "warmup_stable_decay":
            assert self.decay_ratio is not None, "contradictions() refuses it"
            return {
                "num_decay_steps": self.decay_ratio,
                "decay_type": self.decay_type,
                "min_lr_ratio": self.min_lr_ratio,
            }
        if self.num_cycles:
            return {"num_cycles": self.num_cycles}
        return {"min_lr_rate": self.min_lr_ratio} if self.min_lr_ratio else {}

    @property
    def name(self) -> str:
        """The name of transformers' schedule."""
        if self.type == "constant" and self.warmup > 0:
            return "constant_with_warmup"
        return "cosine_with_min_lr" if self.type == "cosine" and self.min_lr_ratio else self.type

    @property
    def warmup(self) -> int | float:
        """The warm-up as transformers takes it: a number of steps, or a share of all steps below 1."""
        return self.warmup_ratio if self.warmup_steps is None else self.warmup_steps


Interval = PositiveInt | Annotated[float, Field(gt=0, lt=1)]
"""A number of optimizer steps, or a share of all steps, which transformers resolves once their number is known."""


class TrainCfg(Block):
    """How long to train, how often to validate, what to recompute, and when to end a run that hangs (seconds)."""

    max_epochs: PositiveInt | PositiveFloat
    max_steps: PositiveInt | None
    val_interval: Interval | None
    early_stopping_patience: PositiveInt | None
    trainable_layers: PositiveInt | None
    global_batch_size: PositiveInt | Literal["auto"] | None
    gradient_checkpointing: bool | Literal["auto"]
    recomputed_layers: PositiveInt | Literal["auto"] | None
    loss: Literal["auto", "whole", "chunked"]
    torch_compile: bool | Literal["deepcompile"]
    sequence_parallel_size: PositiveInt
    autotp_size: PositiveInt
    tiled_mlp: bool
    activation_offloading: bool
    hang_timeout: PositiveFloat | Literal["auto"]
    callbacks: Annotated[tuple[str, ...], Lax]

    @property
    def ranks_a_sample(self) -> int:
        """How many ranks train on the same samples: each has a part of the tokens, or of the layers."""
        return self.sequence_parallel_size * self.autotp_size


class Checkpoint(Block):
    """Resumable checkpoints; interval in optimizer steps or a share of them. Weights may go to the hub too."""

    interval: Interval
    max_keep_ckpts: PositiveInt
    save_best: Literal["auto", "eval_loss"] | None
    repository: str | None
    private: bool
    push: bool

    def interval_of(self, steps: int) -> int:
        """Return the interval of a run with a number of steps; a share of them is rounded up, as in transformers."""
        return self.interval if isinstance(self.interval, int) else max(1, math.ceil(self.interval * steps))

    def contradictions(self) -> Contradictions:
        if self.push and not self.repository:
            yield "push", f"no repository is named; add {Option('push', 'OWNER/NAME')} (checkpoint.repository)"


Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio", "comet_ml", "swanlab", "clearml"]

_Command = str | tuple[str, ...] | list[str] | None

OF_A_TRIAL: JsonObject = {"interval": 1, "trackers": (), "num_samples": 0, "generate": 0, "notify": None}
"""The block `log` of a trial run of a few steps: it records every step, and runs no command at the end."""

NOT_PUSHED: JsonObject = {"repository": None, "push": False}
"""The values of `checkpoint` for a trial run: no weights are pushed."""


class Log(Block):
    """What is recorded; interval in optimizer steps."""

    interval: PositiveInt | Literal["auto"]
    trackers: Annotated[tuple[Tracker, ...], Lax]
    num_samples: NonNegativeInt | Literal["auto"]
    generate: NonNegativeInt
    max_new_tokens: PositiveInt
    notify: _Command

    @field_validator("notify")
    @classmethod
    def _notify_is_a_command(cls, notify: _Command) -> _Command:
        try:
            words = _words(notify)
        except ValueError as error:
            raise ValueError(f"a command line has matching quotes ({error})") from None
        if notify is not None and not (words and words[0]):
            raise ValueError("the command is empty; write one, or None")
        return notify

    @property
    def command(self) -> tuple[str, ...]:
        """The words of `notify`; empty without a command."""
        return _words(self.notify)


def _words(command: str | Sequence[str] | None) -> tuple[str, ...]:
    return tuple(shlex.split(command) if isinstance(command, str) else command or ())


class Randomness(Block):
    """The one seed of weights, data order and dropout."""

    seed: Annotated[int, Field(ge=0, lt=2**32)]


class Split(NamedTuple):
    """How a rank computes its share of an optimizer step: micro-batch, micro-batches a step, and recomputation."""

    micro_batch: int
    accumulation: int
    recompute: bool
    recomputed_layers: int | None = None
    """With `recompute`: only so many decoder layers, the first ones; None: all."""

    @property
    def samples(self) -> int:
        """The samples of one rank and step."""
        return self.micro_batch * self.accumulation

    @property
    def keeps_layers(self) -> bool:
        """Whether some layers keep all of their activations."""
        return not self.recompute or self.recomputed_layers is not None

    def num_recomputed(self, layers: int) -> int:
        """Return how many of so many decoder layers, from the first on, are computed again in the backward pass."""
        if not self.recompute:
            return 0
        return layers if self.recomputed_layers is None else min(layers, self.recomputed_layers)

    @property
    def recomputes(self) -> str:
        """Which layers are computed again, in a word or two: 'all', '13 layers', 'none'."""
        if not self.recompute:
            return "none"
        return "all" if self.recomputed_layers is None else f"{self.recomputed_layers} layers"

    def __str__(self) -> str:
        checkpointing = f"gradient checkpointing {'on' if self.recompute else 'off'}"
        if self.recomputed_layers is not None:
            checkpointing = f"gradient checkpointing of the first {self.recomputed_layers} layers"
        return f"micro-batch {self.micro_batch}, accumulation {self.accumulation}, {checkpointing}"


class RecipeConfig(Block):
    """One complete and checked recipe."""

    model: Model
    architecture: Architecture | None
    quantization: Quantization | None
    adapter: Adapter | None
    objective: AnyObjective
    train_dataloader: Dataloader
    val_dataloader: Dataloader | None
    optim_wrapper: OptimWrapper
    param_scheduler: ParamScheduler
    train_cfg: TrainCfg
    checkpoint: Checkpoint
    log: Log
    randomness: Randomness
    deepspeed: str | JsonObject

    @property
    def loaders(self) -> dict[str, Dataloader]:
        """The dataloaders that the recipe has, by their keys."""
        return {key: loader for key in LOADERS if (loader := getattr(self, key))}

    def balances_router(self, architecture: Architecture | None) -> bool:
        """Return whether the loss that balances the router of a mixture of experts is added."""
        has_experts = bool(architecture and architecture.num_experts)
        return has_experts and self.objective.facts.balances_router and self.model.router_aux_loss_coef != 0

    @property
    def depends_on_micro_batch(self) -> bool:
        """Whether the size of the micro-batch changes what is learned; a router's balance is measured over it."""
        return self.objective.depends_on_micro_batch or self.balances_router(self.architecture)

    @property
    def reads_images(self) -> bool:
        """Whether a vision-language model is trained with its vision tower."""
        return self.model.images is True

    @property
    def teacher_architecture(self) -> Architecture | None:
        """What config.json says of the objective's teacher; None if there is no teacher, or it is not known."""
        keys = getattr(self.objective, "teacher_architecture", None)
        return Architecture.model_validate(keys) if keys else None

    @property
    def needs_bitsandbytes(self) -> bool:
        """Whether the run may need bitsandbytes; a model with its own code may."""
        by_type = self.optim_wrapper.optimizer.facts.library == "bitsandbytes"
        has_4_bit_teacher = self.objective.taught_by is not None and self.objective.taught_by.bits == 4
        return self.quantization is not None or has_4_bit_teacher or by_type or self.model.remote_code

    @property
    def computes_logits_once(self) -> bool:
        """Whether the gradients of the loss are computed with its logits, some tokens at a time."""
        cfg = self.train_cfg
        return self.objective.facts.computes_logits_once and cfg.loss != "whole" and not cfg.torch_compile

    @property
    def packs_experts(self) -> bool:
        """Whether the experts of a mixture are stored in 4 bits; of a model without a description only a rank knows."""
        is_mixture = self.architecture is not None and self.architecture.is_mixture
        return is_mixture and self.quantization is not None and self.quantization.packs_experts

    @property
    def drops_inputs(self) -> bool:
        """Whether dropout changes the inputs of the adapters."""
        return bool(self.adapter and self.adapter.lora_dropout and self.objective.facts.packs)

    def recomputes_reentrantly(self, *, shards: bool, has_experts: bool) -> bool:
        """Return whether recomputation takes reentrant checkpoints; their inputs need a gradient.

        TRL 1.16 takes them for an adapter at ZeRO-3. Their first pass has no gradients, so the loss that keeps a router
        balanced would have none either: a model with experts gets the others, but where it generates.
        """
        return shards and self.adapter is not None and not (has_experts and self.objective.generated_by is None)

    def fuses_lora(self, *, shards: bool) -> bool:
        """Return whether LoRA layers compute as one function: plain ones, on whole weights of 16 bits or more.

        Args:
            shards: ZeRO-3 shards the weights, and gathers those of a layer for that layer's own forward.
        """
        adapter = self.adapter
        is_plain = adapter is not None and not (adapter.use_dora or self.quantization or self.drops_inputs)
        # A compiler fuses by itself, and DeepSpeed splits each matrix of a layer for a layer that calls it.
        return is_plain and not (shards or self.train_cfg.torch_compile or self.train_cfg.autotp_size > 1)

    @property
    def may_recompute_some_layers(self) -> bool:
        """Whether the plan may recompute some layers and keep the others: all have a backward pass, and a formula."""
        cfg = self.train_cfg
        is_auto = cfg.gradient_checkpointing == cfg.recomputed_layers == "auto"
        is_other = self.reads_images or self.model.remote_code
        is_other = is_other or self.packs_experts  # all layers of these are recomputed
        return is_auto and not (is_other or cfg.trainable_layers or cfg.activation_offloading or cfg.torch_compile)

    @property
    def split(self) -> Split:
        """The split of a step; `launch.batch_size` must have set it."""
        accumulation, recompute = self.optim_wrapper.accumulative_counts, self.train_cfg.gradient_checkpointing
        assert accumulation != "auto" and recompute != "auto", "launch.batch_size sets it first"
        layers = self.train_cfg.recomputed_layers
        of_layers = layers if recompute and isinstance(layers, int) else None
        return Split(self.train_dataloader.micro_batch, accumulation, recompute, of_layers)

    def with_split(self, split: Split) -> "RecipeConfig":
        """Return the recipe with this split; validation uses its micro-batch too, unless it has its own."""
        values = {
            f"{key}.batch_size": split.micro_batch
            for key, loader in self.loaders.items()
            if key == LOADERS[0] or loader.batch_size == "auto"
        }
        split_values = {"optim_wrapper.accumulative_counts": split.accumulation}
        split_values |= {"train_cfg.gradient_checkpointing": split.recompute}
        return self.with_values({**values, **split_values, "train_cfg.recomputed_layers": split.recomputed_layers})

    def contradictions(self) -> Contradictions:
        yield from self._contradictions_of_weights()
        yield from self._contradictions_of_rows()
        yield from self._contradictions_of_validation()

    def _contradictions_of_weights(self) -> Contradictions:
        model, adapter, objective, train_cfg = self.model, self.adapter, self.objective, self.train_cfg
        optimizer, is_alone = self.optim_wrapper.optimizer, not self.reads_images
        if self.quantization and not adapter:
            yield "adapter", "quantized weights cannot be trained; set adapter too, or quantization=None"
        if self.quantization and adapter and adapter.changes_base:
            yield "adapter.init_lora_weights", "splits the weights, which are quantized; use True"
        elif self.quantization and adapter and not adapter.path and adapter.init_lora_weights == "orthogonal":
            yield "adapter.init_lora_weights", "takes the type of the weights, which are quantized; use True"
        if adapter and model.freeze:
            yield "adapter", "freezes every part of the model, so model.freeze has no effect; use one of them"
        if adapter and model.vision_lora:
            yield "adapter", "is LoRA on the LLM, which model.vision_lora trains whole; use adapter.vision=True instead"
        if adapter and adapter.changes_base and objective.facts.has_reference:
            why = f"{objective.type} compares with the base, which this takes a part out of; use True"
            yield "adapter.init_lora_weights", why
        if adapter and train_cfg.trainable_layers:
            why = "has no effect with an adapter, which freezes every layer; use one of them"
            yield "train_cfg.trainable_layers", why
        if model.vision_lora and train_cfg.trainable_layers:
            yield "train_cfg.trainable_layers", "freezes the tower, which model.vision_lora trains; use one of them"
        if optimizer.projector_lr and is_alone:
            yield "optim_wrapper.optimizer.projector_lr", "belongs to a model that reads images; use None"
        if optimizer.loraplus_lr_ratio and not adapter:
            why = "belongs to LoRA+, and there is no adapter; use one, or None"
            yield "optim_wrapper.optimizer.loraplus_lr_ratio", why
        if isinstance(train_cfg.recomputed_layers, int) and train_cfg.gradient_checkpointing is False:
            yield "train_cfg.recomputed_layers", "has no effect with train_cfg.gradient_checkpointing=False; use 'auto'"
        if train_cfg.loss != "auto" and not objective.facts.can_chunk_logits:
            yield "train_cfg.loss", f"has no effect for {objective.type}; use 'auto'"

    def _contradictions_of_rows(self) -> Contradictions:
        objective, train_cfg = self.objective, self.train_cfg
        streams = self.train_dataloader.dataset.streaming
        if self.reads_images and not takes_images(objective.type):
            image_objectives = " or ".join(filter(takes_images, OBJECTIVES))
            yield "objective.type", f"learns from text alone; use {image_objectives}, or model.images=False"
        if self.reads_images and train_cfg.sequence_parallel_size > 1:
            yield "train_cfg.sequence_parallel_size", "above 1 shares rows of text alone, not of images; use 1"
        if streams and getattr(objective, "precompute_ref_log_probs", False):
            why = "trains on rows as they come, which objective.precompute_ref_log_probs judges before; use one of them"
            yield "train_dataloader.dataset.streaming", why
        if streams and not train_cfg.max_steps:
            why = "is needed with train_dataloader.dataset.streaming, whose rows are not counted; set it to a number"
            yield "train_cfg.max_steps", why
        for key, loader in self.loaders.items():
            if loader.dataset.trained_turns != "all" and objective.facts.rows != "conversations":
                why = f"chooses turns for sft, and objective {objective.type} has no such choice; use 'all'"
                yield f"{key}.dataset.trained_turns", why
        if getattr(objective, "neftune_noise_alpha", None) and train_cfg.torch_compile:
            why = "adds noise to the embeddings, which train_cfg.torch_compile replaces; use None"
            yield "objective.neftune_noise_alpha", why
        for key, loader in self.loaders.items():
            is_alone = objective.facts.generates and key != "train_dataloader"  # one completion of each prompt
            least = 1 if is_alone else objective.micro_batches(0).start
            if loader.batch_size != "auto" and loader.batch_size < least:
                why = f"must be {least} or more for {objective.type}, which compares an answer with others of its batch"
                yield f"{key}.batch_size", why

    def _contradictions_of_validation(self) -> Contradictions:
        objective_facts, validation = self.objective.facts, self.val_dataloader
        if validation and validation.dataset.streaming and not validation.dataset.held_out:
            yield "val_dataloader.dataset.streaming", "is for training: each validation reads the same rows; use False"
        for key in ("train_cfg.val_interval", "train_cfg.early_stopping_patience", "checkpoint.save_best"):
            if attrgetter(key)(self) and validation is None:
                yield key, "needs a validation loss; set val_dataloader too"
        if not self.log.generate:
            return
        if validation is None:
            rows = f"use {Option('val', 'FILE')} or {Option('val_split', 0.05)}"
            yield "log.generate", f"answers validation prompts, and there are no validation rows; {rows}"
        if objective_facts.scores:
            yield "log.generate", "needs answers, and a reward model writes none; use 0"
        elif not objective_facts.answers_prompts:
            yield "log.generate", f"answers prompts, and the rows of objective {self.objective.type!r} have none; use 0"
        if self.train_cfg.sequence_parallel_size > 1:
            yield "log.generate", "does not work with train_cfg.sequence_parallel_size above 1; use 0"


def resolved_document(config: RecipeConfig) -> JsonObject:
    """Return a resolved recipe as recipe.json holds it."""
    return {"schema": SCHEMA_VERSION, "recipe": config.model_dump(mode="json")}


def resolved_recipe(document: Mapping[str, object], file: Path) -> RecipeConfig:
    """Return the recipe of a recipe.json; the launcher has composed and checked its values.

    Raises:
        RunDirectoryError: another version of tuner has written the file, so its keys may mean something else.
    """
    version = document.get("schema")
    if version != SCHEMA_VERSION:
        message = f"recipe.json has schema version {version!r}, and this version of tuner reads {SCHEMA_VERSION}"
        raise RunDirectoryError(message, where=file, fix="Install the same version of tuner on every node.")
    return RecipeConfig.model_validate(document["recipe"])


@cache
def schema_keys() -> Mapping[tuple[str, ...], object]:
    """Return every key of the schema by path, with its annotation; a key of several blocks has the union of theirs."""
    annotations: dict[tuple[str, ...], object] = {}

    def walk(block: type[Block], prefix: tuple[str, ...]) -> None:
        for name, info in block.model_fields.items():
            keys = (*prefix, name)
            other_annotation = annotations.get(keys)
            annotations[keys] = Union[other_annotation, info.annotation] if other_annotation else info.annotation  # noqa: UP007
            for inner in blocks_of(info.annotation):
                walk(inner, (*prefix, name))

    walk(RecipeConfig, ())
    return annotations
