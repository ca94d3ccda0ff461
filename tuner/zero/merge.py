"""Preset or JSON + recipe + machine -> the final DeepSpeed config, each value with its origin and what it overrode.

Every key has one owner. A final config holds no "auto". This module opens no file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tuner.errors import DeepSpeedConfigError, DsKey, Key, MachineError, ModelError, Option, Text, options, together
from tuner.machine.hardware import Hardware, Precision
from tuner.machine.topology import Batch
from tuner.optimizers import OPTIMIZERS
from tuner.recipes.merging import Keys, Kind, Origin, Overridden, leaves, lookup
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import Optimizer, ParamScheduler, expert_parallel, four_bit_experts
from tuner.recipes.schema.tensor_parallel import SPLIT_BY
from tuner.zero.config import (
    AUTO,
    AUTOEP,
    AUTOTP,
    NONE,
    OFFLOADS,
    STEPPING,
    ZERO,
    Buckets,
    Config,
    Document,
    FinalConfig,
    bucket_sizes,
    device,
    expert_ranks,
    is_on,
    short,
    stage,
)
from tuner.zero.config_schema import schema
from tuner.zero.contradictions import FINAL, needs_cpu_adam
from tuner.zero.lint import Checked, check, check_device

_TOOLS = "g++ and ninja, and nvcc beside GPUs"
_GATHER = "stage3_gather_16bit_weights_on_model_save"
_UNKNOWN_HIDDEN_SIZE = {
    "reduce_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
}
"""DeepSpeed 0.19.8's own defaults, written out where the hidden size is not known."""
_FORMULAS = dict(zip(_UNKNOWN_HIDDEN_SIZE, ("h^2", "0.9 h^2", "10 h"), strict=True))
"""What `bucket_sizes` computes, for people."""
_LARGE = {"reduce_bucket_size": "100 million gradients", "stage3_prefetch_bucket_size": "the weights of a layer"}


def merge(
    recipe: Recipe,
    document: Document,
    batch: Batch,
    precision: Precision,
    hardware: Hardware,
    buckets: Buckets | None = None,
    swap_buffer: int | None = None,
) -> FinalConfig:
    """Return the final config: the document's values, and over them those that the recipe and the machine decide.

    Args:
        buckets: Sizes for what the document leaves open of what ranks send at a time; None: the least ones.
        swap_buffer: The least elements of a buffer for weights on disks; None: the model's shapes are not known.

    Raises:
        DeepSpeedConfigError: the document is wrong, or needs kernels of GPUs that this machine lacks.
        MachineError: it needs a compiler, or the recipe a GPU, that this machine lacks.
        ModelError: the recipe's adapter does not run at its stage.
    """
    checked = check(document)
    check_device(checked.value, hardware.device, document.where, ranks=batch.ranks)
    merger = _Merger(recipe, document, checked)
    merger.own_batch_clipping_and_dtype(batch, precision)
    merger.optimizer(hardware)
    merger.scheduler()
    merger.buckets(buckets)
    merger.offload(hardware)
    merger.swap_buffer(swap_buffer)
    merger.compile(hardware)
    merger.tensor_parallel()
    merger.expert_parallel(batch.ranks)
    merger.rest()
    merger.refuse()
    return merger.result()


@dataclass
class _Merger:
    recipe: Recipe
    document: Document
    checked: Checked
    origins: dict[str, Origin] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config, self.warnings = self.checked.value, list(self.checked.warnings)

    def own(self, keys: Keys, value: object, text: str, note: str = "") -> None:
        """Write a value that the document does not decide; warn if the document has another."""
        block = self.config
        for key in keys[:-1]:
            block = block.setdefault(key, {})
        old, dotted = block.get(keys[-1], AUTO), ".".join(keys)
        overridden: tuple[Overridden, ...] = ()
        if old != AUTO and old != value:
            overridden = (Overridden(old, self.document.place(keys)),)
            where = self.document.where(keys)
            self.warnings.append(f"{dotted} = {value!r} from {text} overrides {old!r} in {where}.{note}")
        block[keys[-1]] = value
        self.origins[dotted] = Origin.derived(text, overridden)

    def over_package(self, keys: Keys, value: object, text: str) -> None:
        """Write a value over one of a preset; what a user has written stays."""
        place, block = self.document.place(keys), lookup(self.config, keys[:-1])
        if place.kind is Kind.PACKAGE:
            overridden = Overridden(block.get(keys[-1]), place)
            block[keys[-1]] = value
            self.origins[".".join(keys)] = Origin.derived(text, (overridden,))

    def origin_text(self, key: str) -> str:
        """Return the recipe's key and its place, for messages."""
        origin = self.recipe.origins.get(key)
        return f"recipe {key} ({origin.text})" if origin else f"recipe {key}"

    def own_batch_clipping_and_dtype(self, batch: Batch, precision: Precision) -> None:
        micro, accumulation = "train_dataloader.batch_size", "optim_wrapper.accumulative_counts"
        self.own(("train_micro_batch_size_per_gpu",), batch.micro_batch, self.origin_text(micro))
        self.own(("gradient_accumulation_steps",), batch.accumulation, self.origin_text(accumulation))
        product = f"{batch.micro_batch} x {batch.accumulation} x {batch.ranks} ranks"
        self.own(("train_batch_size",), batch.global_batch, f"derived: {product}")
        if clip := self.recipe.config.optim_wrapper.clip_grad:
            self.own(("gradient_clipping",), clip.max_norm, self.origin_text("optim_wrapper.clip_grad.max_norm"))
        elif self.config.get("gradient_clipping", AUTO) == AUTO:
            self.own(("gradient_clipping",), 0.0, self.origin_text("optim_wrapper.clip_grad") + ": not clipped")
        text = self.origin_text("optim_wrapper.dtype") if precision.by_recipe else f"detected: {precision.reason}"
        note = f" The machine and the recipe set the compute type ({Key('dtype', '...')})."
        for dtype in ("bf16", "fp16"):
            self.own((dtype, "enabled"), precision.dtype == dtype, text, note)
        param_dtype = (self.config.get("data_types") or {}).get("param_dtype")
        if param_dtype and short(param_dtype) != precision.dtype:
            self.own(("data_types", "param_dtype"), precision.dtype, text, note)

    def optimizer(self, hardware: Hardware) -> None:
        optimizer = self.recipe.config.optim_wrapper.optimizer
        if config_optimizer := self.config.pop("optimizer", None):
            self._warn_of_other("optimizer", *_wished_optimizer(config_optimizer))
        if name := self._made_by_deepspeed(optimizer):
            self._check_kernels(optimizer, hardware)
            known_params = schema()["optimizers"][name.lower()]
            values = optimizer.model_dump(mode="json")
            params = {key: value for key, value in values.items() if key in known_params and value is not None}
            if name == "Muon":
                params["torch_adam"] = True  # its own would build a kernel for the few weights that are no matrices
            self.config["optimizer"] = {"type": name, "params": params}
            text = self.origin_text("optim_wrapper.optimizer.type")
            for dotted, _ in leaves({"optimizer": self.config["optimizer"]}):
                self.origins[dotted] = Origin.derived(text)
            if name == "Muon" and stage(self.config) == 3:
                # runtime/zero/stage3.py, __init__: Muon and reduce scatter cannot be used together
                self.own((ZERO, "reduce_scatter"), False, text)

    def _made_by_deepspeed(self, optimizer: Optimizer) -> str | None:
        """Return DeepSpeed's name of an optimizer that it makes itself; None if the trainer makes it.

        With moments in bf16, offloaded, it makes AdamW too: accelerate 1.15 would make one with moments in fp32.
        """
        keys = ("bf16", "bf16_optimizer_states")
        if not lookup(self.config, keys) or device(self.config, "offload_optimizer") == NONE:
            return optimizer.facts.of_deepspeed
        if optimizer.type != "AdamW" or optimizer.loraplus_lr_ratio or optimizer.projector_lr:
            needs = "needs optimizer.type AdamW, no LoRA+ and no projector_lr"
            problem = f"{'.'.join(keys)} with offload_optimizer {needs}"
            raise DeepSpeedConfigError(problem, where=self.document.where(keys), fix="Remove it, or use AdamW.")
        return "AdamW"

    def _check_kernels(self, optimizer: Optimizer, hardware: Hardware) -> None:
        """Refuse an optimizer if this machine lacks its kernels, and the compiler for them."""
        if hardware.gpus:
            return
        where, kind = self.origin_text("optim_wrapper.optimizer.type"), optimizer.type
        if optimizer.facts.on_cpu == "never":
            fix = "Use AdamW, which has a fused kernel on both, or a machine with a GPU."
            raise MachineError(f"DeepSpeed's {kind} needs a GPU", where=where, fix=fix)
        if optimizer.facts.on_cpu == "offloaded" and device(self.config, "offload_optimizer") == NONE:
            fix = f"Use AdamW, a machine with a GPU, or {Option('deepspeed', 'deepspeed_zero2_offload')}."
            raise MachineError(f"DeepSpeed's {kind} needs a GPU or offloading", where=where, fix=fix)
        if not hardware.has_compiler:
            raise MachineError(f"DeepSpeed's {kind} needs a compiler", where=where, fix=f"Install {_TOOLS}.")

    def scheduler(self) -> None:
        if config_scheduler := self.config.pop("scheduler", None):
            self._warn_of_other("scheduler", *_wished_scheduler(config_scheduler))

    def _warn_of_other(self, block: str, wished: Config, inexpressible: tuple[str, ...]) -> None:
        """Warn that the recipe overrides a block, unless both say the same.

        Args:
            wished: Recipe values by dotted key.
            inexpressible: A sentence for each setting that a recipe cannot express.
        """
        flags = options(*(Key(key, value) for key, value in wished.items() if self._recipe_value(key) != value))
        if flags or inexpressible:
            notes = "".join(f" Note: {note}" for note in inexpressible)
            take = f" To use the JSON's values: {flags}" if flags else ""
            self.warnings.append(f"{block}: the recipe overrides {self.document.where((block,))}.{notes}{take}")

    def _recipe_value(self, key: str) -> object:
        value = lookup(self.recipe.values, tuple(key.split(".")))
        return list(value) if isinstance(value, tuple) else value

    def buckets(self, large: Buckets | None) -> None:
        zero = self.config.setdefault(ZERO, {"stage": 0})
        architecture = self.recipe.config.architecture
        sizes = {"reduce_bucket_size": large.reduce, "stage3_prefetch_bucket_size": large.prefetch} if large else {}
        for key, unknown in _UNKNOWN_HIDDEN_SIZE.items():
            if zero.get(key) != AUTO:
                continue
            if key.startswith("stage3") and zero.get("stage") != 3:
                del zero[key]
            elif key in sizes:
                self.own((ZERO, key), sizes[key], f"derived: {_LARGE[key]}, which each GPU has room for")
            elif architecture is None:
                self.own((ZERO, key), unknown, "DeepSpeed's default: the hidden size is unknown")
            else:
                text = f"derived: {_FORMULAS[key]}, hidden size h = {architecture.hidden_size}"
                self.own((ZERO, key), bucket_sizes(architecture.hidden_size)[key], text)
        self._overlap(has_room=large is not None)

    def _overlap(self, *, has_room: bool) -> None:
        """Decide whether gradients are sent while others are computed, where that is open."""
        keys, offloads = (ZERO, "overlap_comm"), device(self.config, "offload_optimizer") != NONE
        if lookup(self.config, keys) != AUTO:
            return
        if stage(self.config) == 3:
            self.own(keys, True, "DeepSpeed's default at ZeRO-3")
        elif stage(self.config) and has_room and not offloads:
            self.own(keys, True, "derived: each GPU has room for two buckets, and this DeepSpeed has no known error")
        else:
            self.own(keys, False, "derived: it takes a second bucket")

    def offload(self, hardware: Hardware) -> None:
        zero = self.config[ZERO]
        if self.recipe.config.packs_experts:
            four_bit_experts.refuse_disks(zero)
        for block in OFFLOADS:
            if not hardware.gpus and "pin_memory" in (zero.get(block) or {}):
                # Nothing is copied to a GPU, and pinning makes DeepSpeed build an op.
                self.over_package((ZERO, block, "pin_memory"), False, "detected: no GPU")
        if (zero.get("offload_optimizer") or {}).get("device", NONE) in (None, NONE):
            return
        key = "zero_force_ds_cpu_optimizer"
        if self.config.get(key) is None:
            self.own((key,), hardware.has_compiler, f"detected: {_TOOLS if hardware.has_compiler else 'no compiler'}")
            if not hardware.has_compiler:
                self.warnings.append(
                    "the offloaded optimizer uses torch's Adam, several times slower than DeepSpeedCPUAdam: "
                    f"building that needs {_TOOLS}."
                )
                self._needs_no_cpu_adam()
        elif self.config[key] and not hardware.has_compiler:
            fix = f"Install {_TOOLS}, or set it to false."
            where = self.document.where((key,))
            raise MachineError(f"{key} is true, but there is no compiler for it", where=where, fix=fix)

    def swap_buffer(self, least: int | None) -> None:
        """Write the size of the buffers for weights on disks where it is open; refuse one in which DeepSpeed stops."""
        keys = (ZERO, "offload_param", "buffer_size")
        if least is None or stage(self.config) != 3 or device(self.config, "offload_param") != "nvme":
            return
        size = lookup(self.config, keys, AUTO)
        if size == AUTO:
            # With fast_init whole sub-groups pass through the buffers too: no less than DeepSpeed's own size.
            is_fast = is_on(self.config, ZERO, "offload_optimizer", "fast_init")
            self.own(keys, max(least, 100_000_000 * is_fast), "derived: a rank's part of the largest weight")
        elif size < least:
            dotted = ".".join(keys)
            problem = f"{dotted} = {size:,} is less than the {least:,} elements of a weight that a rank swaps"
            fix = f"Remove it, or write {DsKey(dotted, least)}."
            raise DeepSpeedConfigError(problem, where=self.document.where(keys), fix=fix)

    def _needs_no_cpu_adam(self) -> None:
        for block in ("fp16", "bf16"):
            if needs_cpu_adam(self.config, block):
                keys = (block, f"{block}_master_weights_and_grads")
                problem = f"{'.'.join(keys)} needs DeepSpeedCPUAdam, and there is no compiler for it"
                fix = f"Install {_TOOLS}, or set it to false."
                raise MachineError(problem, where=self.document.where(keys), fix=fix)

    def compile(self, hardware: Hardware) -> None:
        key = "train_cfg.torch_compile"
        mode, text = self.recipe.config.train_cfg.torch_compile, self.origin_text(key)
        if mode and not hardware.has_compiler:
            raise MachineError(
                f"torch.compile needs {_TOOLS}, which are not installed", where=text, fix="Install them."
            )
        if mode == "deepcompile" or lookup(self.config, ("compile", "deepcompile")):
            note = f" To use it: {Key(key, 'deepcompile')}."
            self.own(("compile", "deepcompile"), mode == "deepcompile", text, note)
        if mode != "deepcompile":
            return
        if not hardware.gpus:
            fix = f"{Key(key, True)} compiles without it."
            raise MachineError("DeepCompile needs NVIDIA GPUs", where=text, fix=fix)
        if stage(self.config) not in STEPPING:
            problem = f"DeepCompile works at ZeRO stage 1, 2 and 3, and this is stage {stage(self.config)}"
            raise DeepSpeedConfigError(problem, where=text, fix=f"Use {Option('deepspeed', 'zero1')}, zero2 or zero3.")

    def tensor_parallel(self) -> None:
        """Write the recipe's number of ranks that split the layers; embeddings and head stay whole on each."""
        size, config_size = self.recipe.config.train_cfg.autotp_size, lookup(self.config, AUTOTP, 0)
        if size > 1 or config_size > 1:
            self.own(AUTOTP, size, self.origin_text(SPLIT_BY))
        if size > 1:
            why = "derived: the loss reads the whole weight of the head"
            self.own(("tensor_parallel", "vocab_parallel_lm_head"), False, why)

    def expert_parallel(self, num_ranks: int) -> None:
        """Switch AutoEP on where the config says over how many ranks it divides the experts.

        Raises:
            TunerError: it does not go with the recipe.
        """
        size = expert_ranks(self.config)
        if size > 1:
            self.own(("expert_parallel", "enabled"), True, f"derived: {AUTOEP[1]} is {size}")
            if problems := [*expert_parallel.refusals(self.recipe.config, size, num_ranks)]:
                raise together(problems)

    def rest(self) -> None:
        zero = self.config[ZERO]
        if zero.get("stage") == 3 or self.recipe.config.train_cfg.autotp_size > 1:
            self.own((ZERO, _GATHER), True, "derived: the result is saved whole")
        elif zero.get(_GATHER) == AUTO:
            del zero[_GATHER]
        if "optimizer" not in self.config:
            self.own(("zero_allow_untested_optimizer",), True, "derived: the recipe's optimizer is torch's own")
        for keys in list(_autos(self.config)):
            del lookup(self.config, keys[:-1])[keys[-1]]
            where = self.document.where(keys)
            self.warnings.append(f"{'.'.join(keys)} = 'auto' in {where} is dropped: DeepSpeed's own default applies.")
        for dotted, _ in leaves(self.config):
            keys = tuple(dotted.split("."))
            self.origins.setdefault(dotted, self.document.origin(keys))

    def refuse(self) -> None:
        for rule in FINAL:
            if rule.holds(self.config):
                raise DeepSpeedConfigError(rule.problem, where=self.document.where(rule.keys), fix=rule.fix)
        config = self.recipe.config
        if stage(self.config) == 3 and config.quantization and config.adapter and config.adapter.use_dora:
            # PEFT 0.21 copies the weight for the magnitudes, and DeepSpeed 0.19.8 ends at a copy that it does not know.
            problem = "DoRA on quantized weights does not run at ZeRO-3"
            fix = f"Use {Option('deepspeed', 'zero2')}, or LoRA: {Key('use_dora', False)}."
            raise ModelError(problem, where="adapter.use_dora", fix=fix)

    def result(self) -> FinalConfig:
        present = {dotted for dotted, _ in leaves(self.config)}
        origins = {key: origin for key, origin in self.origins.items() if key in present}
        return FinalConfig(
            name=self.document.name,
            config=self.config,
            origins=origins,
            warnings=tuple(map(Text, self.warnings)),
            from_catalog=self.document.preset is not None,
            config_warnings=self.checked.warnings,
        )


def _autos(value: object, prefix: Keys = ()) -> Iterator[Keys]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _autos(item, (*prefix, key))
    elif value == AUTO:
        yield prefix


# --- The optimizer and scheduler blocks of a config, as recipe values ---

_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_MODES = ("torch_adam", "adam_w_mode", "fused", "foreach", "set_grad_none")
"""How an optimizer is computed. A recipe has no such keys."""


def _wished_optimizer(block: Config) -> tuple[Config, tuple[str, ...]]:
    """Return the recipe values that an optimizer block means, and what a recipe cannot express."""
    params, prefix = _params(block), "optim_wrapper.optimizer."
    kind = _optimizer_type(block["type"], params)
    translated: Config = {key: params[key] for key in ("lr", "betas", "eps", "weight_decay") if key in params}
    notes = [f"a recipe has no {key}." for key in params if key not in (*translated, *_MODES)]
    if kind is None:
        return {}, (f"optim_wrapper.optimizer does not support {block['type']!r}.", *notes)
    values: Config = {"type": kind, **translated}
    return {f"{prefix}{key}": value for key, value in values.items()}, tuple(notes)


def _wished_scheduler(block: Config) -> tuple[Config, tuple[str, ...]]:
    """Return the recipe values that a scheduler block means, and what a recipe cannot express."""
    params, kind = _params(block), _SCHEDULES.get(block["type"])
    if kind is None:
        return {}, (f"param_scheduler has no counterpart of {block['type']}.",)
    # A recipe may have the options of another schedule, which would contradict this one.
    values: Config = {f"param_scheduler.{key}": value for key, value in ParamScheduler.UNUSED.items()}
    values["param_scheduler.type"] = kind
    if warmup := params.get("warmup_num_steps"):
        values["param_scheduler.warmup_steps"] = warmup
    if isinstance(params.get("warmup_max_lr"), int | float):
        values["optim_wrapper.optimizer.lr"] = params["warmup_max_lr"]
    return values, ()


def _params(block: Config) -> Config:
    return {key: value for key, value in (block.get("params") or {}).items() if value != AUTO}


def _optimizer_type(name: str, params: Config) -> str | None:
    # DeepSpeed reads its own names in any case, and its Adam is AdamW unless adam_w_mode is false.
    if name.lower() == "adam" and params.get("adam_w_mode", True):
        return "AdamW"
    return next((optimizer for optimizer in OPTIMIZERS if optimizer.lower() == name.lower()), None)
