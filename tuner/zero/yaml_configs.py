"""DeepSpeed configs in other tools' YAML: accelerate's config file, and ROLL's presets and pipelines.

accelerate's keys are those of 1.15: ClusterConfig and DeepSpeedPlugin. ROLL trained with DeepSpeed up to 0.2;
`importers` reads the rest of a pipeline. `lint` checks the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tuner.errors import DeepSpeedConfigError, Key, Option, brief_repr, did_you_mean
from tuner.hooks import other_tools
from tuner.machine.topology import LaunchFlags
from tuner.recipes import yaml_text
from tuner.recipes.document_file import ACCELERATE, KEYS_OF_ACCELERATE
from tuner.recipes.merging import Keys, Kind, Layer, Merged, Origin, Place, leaves, lookup, nested
from tuner.recipes.yaml_text import Yaml
from tuner.zero import config, presets
from tuner.zero.config import Config, Document

_DEEPSPEED = "deepspeed_config"
DTYPE = "mixed_precision"
_ZERO = "zero_optimization"
_DEFAULT_STAGE = 2
"""Source: DeepSpeedPlugin.__post_init__."""
_NO_ZERO = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU")
_DTYPES = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": None}

MAPPED: Mapping[str, Keys] = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
    "offload_optimizer_device": (_ZERO, "offload_optimizer", "device"),
    "offload_optimizer_nvme_path": (_ZERO, "offload_optimizer", "nvme_path"),
    "offload_param_device": (_ZERO, "offload_param", "device"),
    "offload_param_nvme_path": (_ZERO, "offload_param", "nvme_path"),
    "seq_parallel_communication_data_type": ("seq_parallel_communication_data_type",),
    "zero3_save_16bit_model": (_ZERO, "stage3_gather_16bit_weights_on_model_save"),
    "zero_stage": (_ZERO, "stage"),
}
"""Key of `deepspeed_config` -> DeepSpeed's."""
FILE = "deepspeed_config_file"
USED = (
    *KEYS_OF_ACCELERATE,
    DTYPE,
    "num_processes",
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
)
"""Keys at the top that are read."""


class LeftOut(NamedTuple):
    """A key without counterpart: the reason, and values without effect, besides false, null, 'no' and empty ones."""

    reason: str
    harmless: tuple[object, ...] = ()


_BY_NODES = "each node starts its own ranks: --nnodes, --node-rank, --master-addr, or tuner submit"
_NO_FP8 = "tuner computes in bf16, fp16 or fp32, as the machine allows"
_COMPILES = f"the recipe sets it: {Key('torch_compile', True)}"
_OF_TPUS = "command_file commands downcast_bf16 tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_vm tpu_zone"
LEFT_OUT: Mapping[str, LeftOut] = {
    **dict.fromkeys(_OF_TPUS.split(), LeftOut("tuner trains on GPUs and CPUs")),
    "debug": LeftOut("about accelerate's own checks"),
    "dynamo_backend": LeftOut(_COMPILES, ("NO",)),
    "dynamo_config": LeftOut(_COMPILES),
    "enable_cpu_affinity": LeftOut("--bind-cores-to-rank does it"),
    "fp16": LeftOut(f"accelerate's old name: use {DTYPE}"),
    "fp8_config": LeftOut(_NO_FP8),
    "fsdp_config": LeftOut("DeepSpeed shards by itself"),
    "gpu_ids": LeftOut("CUDA_VISIBLE_DEVICES selects the GPUs", ("all",)),
    "main_training_function": LeftOut("tuner uses its own trainer", ("main",)),
    "megatron_lm_config": LeftOut("tuner trains with DeepSpeed"),
    "mpirun_config": LeftOut("tuner starts the ranks; in those of an mpirun use --launcher mpi"),
    "parallelism_config": LeftOut(f"the recipe sets it: {Key('sequence_parallel_size', 2)}, {Key('autotp_size', 2)}"),
    "rdzv_backend": LeftOut("the nodes meet at --master-addr", ("static", "c10d")),
    "same_network": LeftOut("nothing depends on it", (True,)),
    "use_cpu": LeftOut("CUDA_VISIBLE_DEVICES= hides the GPUs"),
}
"""Keys at the top."""
LEFT_OUT_OF_DEEPSPEED: Mapping[str, LeftOut] = {
    "deepspeed_exclusion_filter": LeftOut("tuner train --hostfile FILE --exclude HOSTS starts the nodes"),
    "deepspeed_hostfile": LeftOut("tuner train --hostfile FILE starts its nodes"),
    "deepspeed_inclusion_filter": LeftOut("tuner train --hostfile FILE --include HOSTS starts the nodes"),
    "deepspeed_moe_layer_cls_names": LeftOut("transformers knows which layers hold experts"),
    "deepspeed_multinode_launcher": LeftOut(_BY_NODES, ("standard",)),
    "enable_msamp": LeftOut(_NO_FP8),
    "is_train_batch_min": LeftOut("the recipe sets the batch", (True,)),
    "msamp_opt_level": LeftOut(_NO_FP8, ("O1",)),
    "transformer_moe_cls_names": LeftOut("transformers knows which layers hold experts"),
    "zero3_init_flag": LeftOut("the worker loads weights as the ZeRO stage needs them", (True,)),
}
"""Keys of `deepspeed_config`."""


class AccelerateConfig:
    """The content of an accelerate config.

    Attributes:
        base: The preset, or the DeepSpeed JSON that `deepspeed_config_file` names.
        layers: Its values over that base, with their places.
        launch: Where the run starts.
        dtype: The compute type; None if the file has none.
        notes: What was left out.
    """

    def __init__(self, yaml: Yaml, name: str) -> None:
        """Read a file called `name`.

        Raises:
            DeepSpeedConfigError: it trains without DeepSpeed, or has a key or a value that accelerate does not know.
        """
        self.values, self.lines, self.name = yaml.values, yaml.lines, name
        inner = self._deepspeed()
        self._refuse_unknown(inner)
        self.base, self.layers = self._base(inner)
        self.dtype, of_dtype = self._dtype()
        self.dtype_place, self.launch = self.place(DTYPE), self._launch()
        of_blocks = ((self.values, LEFT_OUT, ()), (inner, LEFT_OUT_OF_DEEPSPEED, (_DEEPSPEED,)))
        left_out = (note for block in of_blocks for note in self._left_out(*block))
        self.notes: tuple[DeepSpeedConfigError, ...] = (*left_out, *of_dtype)

    def place(self, *keys: str) -> Place:
        return Place(Kind.FILE, self.name, self.lines.get(keys))

    def wrong(self, problem: str, *keys: str, fix: str | None = None) -> DeepSpeedConfigError:
        return DeepSpeedConfigError(problem, where=self.place(*keys), fix=fix)

    def _deepspeed(self) -> Config:
        """Return the block about DeepSpeed; stage 0 if the ranks only share data."""
        if (where := self.values.get("compute_environment", "LOCAL_MACHINE")) != "LOCAL_MACHINE":
            fix = "tuner submit starts a Slurm job; elsewhere, start tuner on each node."
            raise self.wrong(f"compute_environment = {where!r} would start its own job", "compute_environment", fix=fix)
        inner = self.values.get(_DEEPSPEED) or {}
        kind = str(self.values.get("distributed_type") or ("DEEPSPEED" if inner else "NO")).upper()
        if not isinstance(inner, dict):
            raise self.wrong(f"{_DEEPSPEED} = {brief_repr(inner)} is not a block", _DEEPSPEED)
        if kind in _NO_ZERO or (kind == "FALSE"):  # YAML reads NO without quotes as false
            return {"zero_stage": 0}
        if kind != "DEEPSPEED":
            fix = (
                f"{Option('deepspeed', 'zero3')} shards the weights over the ranks, "
                "zero3_offload moves them to the host."
            )
            raise self.wrong(f"distributed_type = {kind}: tuner trains with DeepSpeed", "distributed_type", fix=fix)
        return inner

    def _refuse_unknown(self, inner: Mapping[str, object]) -> None:
        top, in_block = (*USED, *LEFT_OUT), (*MAPPED, FILE, *LEFT_OUT_OF_DEEPSPEED)
        for keys, known in (*(((key,), top) for key in self.values), *(((_DEEPSPEED, key), in_block) for key in inner)):
            if keys[-1] not in known:
                fix = did_you_mean(keys[-1], known) or "Remove it."
                raise self.wrong(f"accelerate's config has no key {'.'.join(keys)!r}", *keys, fix=fix)

    def _left_out(
        self, values: Mapping[str, object], table: Mapping[str, LeftOut], block: Keys
    ) -> Iterator[DeepSpeedConfigError]:
        for key, value in values.items():
            is_empty = not value or str(value).lower() in ("no", "false", "none")
            if key in table and not is_empty and value not in table[key].harmless:
                problem = f"{key} = {brief_repr(value)} has no counterpart and is ignored: {table[key].reason}"
                yield self.wrong(problem, *block, key)

    def _base(self, inner: Mapping[str, object]) -> tuple[str, list[Layer]]:
        """Return the preset or the file that the block means, and the values over it."""
        mapped = {key: value for key, value in inner.items() if key in MAPPED and value not in (None, "none")}
        stage, base = inner.get("zero_stage", _DEFAULT_STAGE), inner.get(FILE)
        if type(stage) is not int or stage not in range(4):
            raise self.wrong(f"zero_stage = {brief_repr(stage)} is not 0, 1, 2 or 3", _DEEPSPEED, "zero_stage")
        if base in (None, "none"):
            mapped.pop("zero_stage", None)
            preset = presets.of_stage(stage, offloads=any(key.endswith("_device") for key in mapped))
            # The file means the devices that it does not name.
            base, mapped = preset.name, {f"{block}_device": "none" for block in preset.offloaded} | mapped
            if stage != 3:  # without effect there
                mapped.pop("zero3_save_16bit_model", None)
        layers = [Layer.at(self.place(_DEEPSPEED, key), nested(MAPPED[key], value)) for key, value in mapped.items()]
        return str(base), layers

    def _dtype(self) -> tuple[str | None, tuple[DeepSpeedConfigError, ...]]:
        written = self.values.get(DTYPE)
        if written is None:
            return None, ()
        word = str(written or "no").lower()  # YAML reads `no` without quotes as false
        if word not in _DTYPES:
            raise self.wrong(f"{DTYPE} = {brief_repr(written)} is not no, bf16, fp16 or fp8", DTYPE)
        if _DTYPES[word] is None:
            return None, (self.wrong(f"{DTYPE} = {word} has no counterpart and is ignored: {_NO_FP8}", DTYPE),)
        return _DTYPES[word], ()

    def _launch(self) -> LaunchFlags:
        machines = self._count("num_machines", 1) or 1
        processes = self._count("num_processes", 1)
        if processes is not None and processes % machines:
            problem = (
                f"num_processes = {processes} cannot be divided by num_machines = {machines}: "
                "it is the number on all machines"
            )
            raise self.wrong(problem, "num_processes")
        ip = self.values.get("main_process_ip")
        return LaunchFlags(
            nproc_per_node=processes // machines if processes is not None else None,
            nnodes=machines,
            node_rank=self._count("machine_rank", 0) if machines > 1 else None,
            master_addr=str(ip) if ip and machines > 1 else None,
            master_port=self._count("main_process_port", 1) if machines > 1 else None,
            file=self.name,
        )

    def _count(self, key: str, least: int) -> int | None:
        value = self.values.get(key)
        if value is None or value == "" or value == -1:  # which accelerate takes for a missing value
            return None
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if type(value) is not int or value < least:
            fix = f"Use a whole number, {least} or more."
            raise self.wrong(f"{key} = {brief_repr(value)} is not a valid number", key, fix=fix)
        return value


# --- ROLL ---

_ROLES = ("sft_train", "student", "actor_train")
_STRATEGY, _CONFIG = "strategy_args", "strategy_config"


def read_roll(yaml: Yaml, path: Path, name: str) -> Document:
    """Return the config in a file called `name`: the one of the role that trains, or the only preset.

    Raises:
        DeepSpeedConfigError: it holds no such config, or several; or `defaults` or `${...}` are wrong.
    """
    merged = yaml_text.with_defaults(yaml, path.parent, name, DeepSpeedConfigError)
    at = _role(merged) or _only_preset(merged, name)

    def wrong(problem: str, keys: Keys, fix: str) -> DeepSpeedConfigError:
        return DeepSpeedConfigError(problem, where=merged.place_of(keys), fix=fix)

    value, _ = yaml_text.with_references(merged.values, wrong, at=at)
    if not isinstance(value, dict):
        raise DeepSpeedConfigError(f"{'.'.join(at)} is not a DeepSpeed config", where=merged.place_of(at), fix=_FIX)
    reference = lookup(merged.values, at)
    written = tuple(reference[2:-1].split(".")) if isinstance(reference, str) else at
    origins: dict[config.Keys, Origin] = {}
    for key, _ in leaves(value):
        keys = tuple(key.split("."))
        for inner in (keys[:end] for end in range(1, len(keys) + 1)):
            origins[inner] = Origin(merged.place_of((*written, *inner)))
    return Document(value, name, origins=origins)


_FIX = "Use a preset (zero3), a DeepSpeed JSON, an accelerate config, or a ROLL preset."


def _role(merged: Merged) -> Keys | None:
    for role in _ROLES:
        block = lookup(merged.values, (role, _STRATEGY))
        if isinstance(block, dict):
            strategy, at = block.get("strategy_name"), (role, _STRATEGY, _CONFIG)
            if strategy == "deepspeed_train":
                return at
            problem = f"{role} is trained by {strategy}, so there is no DeepSpeed config"
            raise DeepSpeedConfigError(problem, where=merged.place_of(at[:-1]), fix=_FIX)
    return None


def _only_preset(merged: Merged, name: str) -> Keys:
    presets = [key for key, value in merged.values.items() if isinstance(value, dict) and _ZERO in value]
    if len(presets) == 1:
        return (presets[0],)
    if presets:
        problem = f"{name} holds several DeepSpeed configs: {', '.join(presets)}"
        raise DeepSpeedConfigError(problem, where=name, fix="Give the file of one of them.")
    is_training = other_tools().owners(merged.values) not in ([], [ACCELERATE])
    fix = f"It is a training config: tuner train {name}." if is_training else _FIX
    raise DeepSpeedConfigError(f"{name} has no DeepSpeed config", where=name, fix=fix)
