"""What a recipe may hold: every key, its type, its range; one block of blocks, checked without torch.

Values and defaults stand in `configs/base.py`; a field has a default here only inside a block that may be None.
"""

from collections.abc import Container, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union

from pydantic_core import core_schema as core

from tuner.errors import RunDirectoryError
from tuner.recipes.adapter import Adapter, Quantization
from tuner.recipes.architecture import Architecture
from tuner.recipes.block import (
    Block,
    Field,
    Fraction,
    Lax,
    Mode,
    PositiveFloat,
    PositiveInt,
    blocks_of,
    check_key,
    wrong_key,
)
from tuner.recipes.log import Log
from tuner.recipes.objective import Objective, least_batch_size
from tuner.recipes.optimizer import BITSANDBYTES_OPTIMIZERS, OptimWrapper
from tuner.recipes.origin import Keys

LOADERS = ("train_dataloader", "val_dataloader")
"""The keys of a recipe that read rows."""
GLOBAL_BATCH = "train_cfg.global_batch_size"
SCHEMA_VERSION = 1
"""Version of recipe.json. It goes up when a key changes its meaning or is removed."""


class Model(Block):
    """The weights to start from."""

    path: str | None
    revision: str | None
    chat_template: str | None
    attn_implementation: str | None
    use_liger_kernel: bool | Literal["auto"]
    trust_remote_code: bool
    remote_code: bool
    resize_embeddings: bool
    router_aux_loss_coef: Annotated[float, Field(ge=0)] | None

    @check_key("trust_remote_code")
    @classmethod
    def _remote_code_needs_a_commit(cls, trusted: bool, info: core.ValidationInfo) -> bool:
        revision = info.data.get("revision") or ""
        if trusted and not (len(revision) == 40 and set(revision) <= set("0123456789abcdef")):
            raise ValueError("model.revision must be a full 40-digit commit for that")
        return trusted


class Rows(Block):
    """Where rows are, and how one is read."""

    path: str | None
    name: str | None = None
    split: str = "train"
    format: str | None = None
    columns: dict[str, str] | None = None
    system: str | None = None


class Share(Rows):
    """One data set of a mixture; weight 0.5 takes every second row of it, 2 takes each row twice."""

    weight: PositiveFloat = 1.0

    def model_dump(self, *, mode: Mode = "python", exclude: Container[str] = ()) -> dict[str, Any]:
        """Return the keys that were given alone."""
        values = super().model_dump(mode=mode, exclude=exclude)
        return {key: value for key, value in values.items() if key in self.model_fields_set}


OF_ONE_DATA_SET = tuple(key for key in Rows.model_fields if key not in ("path", "split"))
"""Keys that say nothing of another data set. `split` is not among them: nearly all have 'train'."""


def one_data_set(path: str | None) -> dict[str, Any]:
    """Return what makes a `dataset` block mean the data set at `path` (None: of a mixture), and nothing from before."""
    return {**dict.fromkeys((*OF_ONE_DATA_SET, "mixture", "max_rows")), "path": path, "split": "train"}


class Dataset(Rows):
    """Rows and how they become samples; max_length in tokens.

    `val_split` of the rows are held out by `val_seed`; `held_out`: these rows, not the others.
    """

    mixture: Annotated[tuple[Share, ...], Lax, Field(min_length=1)] | None = None
    max_rows: PositiveInt | None = None
    val_split: Annotated[float, Field(gt=0, lt=1)] | None = None
    val_seed: Annotated[int, Field(ge=0)] | None = None
    held_out: bool = False
    bad_rows: Annotated[int, Field(ge=0)] = 0
    max_length: PositiveInt
    packing: bool
    pack_length: PositiveInt | Literal["auto"] | None = None
    num_proc: PositiveInt | Literal["auto"] = "auto"
    tokenizer_backend: Literal["auto", "tokenizers"] = "auto"
    thinking: Literal["keep", "strip", "last"] | None = None
    streaming: bool | PositiveInt = False

    @check_key("streaming")
    @classmethod
    def _a_stream_is_of_one_data_set(cls, streaming: bool | int, info: core.ValidationInfo) -> bool | int:
        if streaming and info.data.get("mixture"):
            raise ValueError("a stream reads one data set, not a mixture; join the files, or set streaming=False")
        if streaming and info.data.get("val_split") and not info.data.get("held_out"):
            raise ValueError("no rows of a stream are held out; validate on another file: --val FILE")
        return streaming

    @property
    def pack_tokens(self) -> int:
        """Tokens that a packed row is filled to; what is longer has a row of its own, up to max_length."""
        return min(self.pack_length, self.max_length) if isinstance(self.pack_length, int) else self.max_length

    @property
    def shares(self) -> tuple[Rows, ...]:
        """The data sets whose rows are read: those of the mixture, or this one alone."""
        return self.mixture or (self,)


class Dataloader(Block):
    """Samples into micro-batches, per process."""

    batch_size: PositiveInt | Literal["auto"]
    num_workers: Annotated[int, Field(ge=0)] = 0
    dataset: Dataset

    @property
    def micro_batch(self) -> int:
        """`batch_size` of a recipe whose split is settled."""
        assert self.batch_size != "auto", "settled by launch.splitting before anybody asks"
        return self.batch_size


class ParamScheduler(Block):
    """The learning rate's course over all optimizer steps."""

    type: Literal["cosine", "linear", "constant", "cosine_with_restarts", "polynomial", "inverse_sqrt"]
    warmup_ratio: Fraction


CHOOSES_LOSS = ("sft", "pretrain", "dpo", "kto")
"""Objectives of which TRL has a loss in chunks; ORPO's takes the logits whole, a reward model has none."""


class TrainCfg(Block):
    """How long, how often it is validated, what is recomputed, and when a run that stands still is ended (seconds)."""

    max_epochs: PositiveInt | PositiveFloat
    max_steps: PositiveInt | None
    val_interval: PositiveInt | None
    early_stopping_patience: PositiveInt | None
    trainable_layers: PositiveInt | None
    global_batch_size: PositiveInt | Literal["auto"] | None
    gradient_checkpointing: bool | Literal["auto"]
    loss: Literal["auto", "whole", "chunked"]
    torch_compile: bool | Literal["deepcompile"]
    sequence_parallel_size: PositiveInt
    tiled_mlp: bool
    activation_offloading: bool
    hang_timeout: PositiveFloat


class Checkpoint(Block):
    """Resumable checkpoints; interval in optimizer steps."""

    interval: PositiveInt
    max_keep_ckpts: PositiveInt
    save_best: Literal["auto", "eval_loss"] | None


class Randomness(Block):
    """The one seed of weights, data order and dropout."""

    seed: Annotated[int, Field(ge=0, lt=2**32)]


class Split(NamedTuple):
    """How a rank computes its share of an optimizer step: samples at a time, how often, and what it keeps of them."""

    micro_batch: int
    accumulation: int
    recompute: bool

    @property
    def samples(self) -> int:
        """The samples of one rank and step."""
        return self.micro_batch * self.accumulation

    def __str__(self) -> str:
        return f"{self.micro_batch} x {self.accumulation}, {'with' if self.recompute else 'without'} recomputation"


class RecipeConfig(Block):
    """One recipe, whole and checked."""

    model: Model
    architecture: Architecture | None
    quantization: Quantization | None
    adapter: Adapter | None
    objective: Objective
    train_dataloader: Dataloader
    val_dataloader: Dataloader | None
    optim_wrapper: OptimWrapper
    param_scheduler: ParamScheduler
    train_cfg: TrainCfg
    checkpoint: Checkpoint
    log: Log
    randomness: Randomness
    deepspeed: str | dict[str, Any]

    @property
    def loaders(self) -> dict[str, Dataloader]:
        """The dataloaders that the recipe has, by their keys."""
        return {key: loader for key in LOADERS if (loader := getattr(self, key))}

    @property
    def needs_bitsandbytes(self) -> bool:
        """Whether something in it may come from bitsandbytes; a model's own code is not known."""
        by_type = self.optim_wrapper.optimizer.type in BITSANDBYTES_OPTIMIZERS
        return self.quantization is not None or by_type or self.model.remote_code

    @property
    def split(self) -> Split:
        """The split, of a recipe in which it is settled."""
        accumulation, recompute = self.optim_wrapper.accumulative_counts, self.train_cfg.gradient_checkpointing
        assert accumulation != "auto" and recompute != "auto", "settled by launch.splitting before anybody asks"
        return Split(self.train_dataloader.micro_batch, accumulation, recompute)

    def with_split(self, split: Split) -> "RecipeConfig":
        """Return the recipe with this split; validation takes its micro-batch where it has none of its own."""
        values = {
            f"{key}.batch_size": split.micro_batch
            for key, loader in self.loaders.items()
            if key == LOADERS[0] or loader.batch_size == "auto"
        }
        own = {"optim_wrapper.accumulative_counts": split.accumulation}
        return self.with_values({**values, **own, "train_cfg.gradient_checkpointing": split.recompute})

    @check_key("adapter")
    @classmethod
    def _quantized_weights_need_an_adapter(cls, adapter: Adapter | None, info: core.ValidationInfo) -> Adapter | None:
        if info.data.get("quantization") and not adapter:
            raise ValueError("quantized weights cannot be trained; set adapter too, or quantization=None")
        if info.data.get("quantization") and adapter and adapter.changes_base:
            why = f"= {adapter.init_lora_weights!r} splits the weights, which are quantized; use True"
            raise wrong_key("init_lora_weights", why)
        return adapter

    @check_key("objective")
    @classmethod
    def _the_reference_is_the_base(cls, objective: Objective, info: core.ValidationInfo) -> Objective:
        adapter = info.data.get("adapter")
        if adapter and adapter.changes_base and objective.type in ("dpo", "kto"):
            why = f"{objective.type} compares with the base, which adapter.init_lora_weights = "
            raise wrong_key("type", f"{why}{adapter.init_lora_weights!r} takes a part out of; take True")
        return objective

    @check_key("optim_wrapper")
    @classmethod
    def _lora_plus_needs_lora(cls, wrapper: OptimWrapper, info: core.ValidationInfo) -> OptimWrapper:
        if wrapper.optimizer.loraplus_lr_ratio and "adapter" in info.data and not info.data["adapter"]:
            raise wrong_key(
                "optimizer.loraplus_lr_ratio", "belongs to LoRA+, and there is no adapter; use one, or None"
            )
        return wrapper

    @check_key("train_dataloader")
    @classmethod
    def _a_stream_is_not_judged_before(cls, loader: Dataloader, info: core.ValidationInfo) -> Dataloader:
        if loader.dataset.streaming and getattr(info.data.get("objective"), "precompute_ref_log_probs", False):
            why = "trains on rows as they come, which objective.precompute_ref_log_probs judges before; use one of them"
            raise wrong_key("dataset.streaming", why)
        return loader

    @check_key("val_dataloader")
    @classmethod
    def _validation_reads_all_its_rows(cls, loader: Dataloader | None, info: core.ValidationInfo) -> Dataloader | None:
        if loader and loader.dataset.streaming and not loader.dataset.held_out:
            raise wrong_key("dataset.streaming", "is for training: each validation reads the same rows; use False")
        return loader

    @check_key("train_dataloader", "val_dataloader")
    @classmethod
    def _an_answer_needs_others_in_its_batch(
        cls, loader: Dataloader | None, info: core.ValidationInfo
    ) -> Dataloader | None:
        objective = info.data.get("objective")
        least = least_batch_size(objective) if objective else 0
        if loader and objective and loader.batch_size != "auto" and loader.batch_size < least:
            why = f"must be {least} or more for {objective.type}, which compares an answer with others of its batch"
            raise wrong_key("batch_size", why)
        return loader

    @check_key("train_cfg", "checkpoint")
    @classmethod
    def _what_is_best_is_known_by_validation(cls, block: TrainCfg | Checkpoint, info: core.ValidationInfo) -> Any:
        for key in ("val_interval", "early_stopping_patience", "save_best"):
            if getattr(block, key, None) and info.data.get("val_dataloader", block) is None:
                raise wrong_key(key, "needs a validation loss; set val_dataloader too")
        return block

    @check_key("log")
    @classmethod
    def _answers_need_validation_prompts(cls, log: Log, info: core.ValidationInfo) -> Log:
        objective, train_cfg = info.data.get("objective"), info.data.get("train_cfg")
        if not log.generate:
            return log
        if info.data.get("val_dataloader", log) is None:
            why = "answers validation prompts, and there are no validation rows; use --val FILE or --val-split 0.05"
            raise wrong_key("generate", why)
        if objective and objective.type == "reward":
            raise wrong_key("generate", "needs answers, and a reward model writes none; use 0")
        if objective and objective.type == "pretrain":
            raise wrong_key("generate", "answers prompts, and the rows of objective 'pretrain' have none; use 0")
        if train_cfg and train_cfg.sequence_parallel_size > 1:
            raise wrong_key("generate", "does not work with train_cfg.sequence_parallel_size above 1; use 0")
        return log

    @check_key("train_cfg")
    @classmethod
    def _an_adapter_freezes_every_layer(cls, train_cfg: TrainCfg, info: core.ValidationInfo) -> TrainCfg:
        if train_cfg.trainable_layers and info.data.get("adapter"):
            raise wrong_key(
                "trainable_layers", "has no effect with an adapter, which freezes every layer; use one of them"
            )
        return train_cfg

    @check_key("train_cfg")
    @classmethod
    def _a_stream_has_no_known_end(cls, train_cfg: TrainCfg, info: core.ValidationInfo) -> TrainCfg:
        loader = info.data.get("train_dataloader")
        if loader and loader.dataset.streaming and not train_cfg.max_steps:
            why = "is needed with train_dataloader.dataset.streaming, whose rows are not counted; set it to a number"
            raise wrong_key("max_steps", why)
        return train_cfg

    @check_key("train_cfg")
    @classmethod
    def _some_losses_are_computed_one_way_alone(cls, train_cfg: TrainCfg, info: core.ValidationInfo) -> TrainCfg:
        objective = info.data.get("objective")
        if objective and train_cfg.loss != "auto" and objective.type not in CHOOSES_LOSS:
            raise wrong_key("loss", f"= {train_cfg.loss!r} has no effect for {objective.type}; use 'auto'")
        return train_cfg


def resolved_document(config: RecipeConfig) -> dict[str, Any]:
    """Return a resolved recipe as recipe.json holds it."""
    return {"schema": SCHEMA_VERSION, "recipe": config.model_dump(mode="json")}


def resolved_recipe(document: Mapping[str, Any], file: Path) -> RecipeConfig:
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
def schema_keys() -> Mapping[Keys, Any]:
    """Return every key of the schema, by path, with its annotation; where blocks exclude each other, that of any."""
    found: dict[Keys, Any] = {}

    def walk(block: type[Block], prefix: Keys) -> None:
        for name, info in block.model_fields.items():
            keys = (*prefix, name)
            found[keys] = Union[found[keys], info.annotation] if keys in found else info.annotation  # noqa: UP007
            for inner in blocks_of(info.annotation):
                walk(inner, (*prefix, name))

    walk(RecipeConfig, ())
    return found
