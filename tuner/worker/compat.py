"""Where tuner reaches into DeepSpeed, accelerate and transformers: what it mends there, and in which version.

Versions seen: DeepSpeed 0.19.8, accelerate 1.14, transformers 5.23, torch 2.13. It decides nothing about a run.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import deepspeed.ops
import torch
from datasets import Dataset
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch.distributed import distributed_c10d
from torch.nn.utils import clip_grads_with_norm_
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import DPOTrainer, KTOTrainer, SFTTrainer

from tuner.errors import MachineError

_FOREVER = timedelta(days=14)  # milliseconds of it fit 32 bits
_NAMES: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("torch", distributed_c10d, ("default_pg_timeout", "default_pg_nccl_timeout")),
    ("deepspeed", deepspeed.ops, ("__compatible_ops__",)),
    ("deepspeed", DeepSpeedEngine, ("clip_fp32_gradients", "was_step_applied", "_zero3_consolidated_16bit_state_dict")),
    ("transformers", Trainer, ("_save_checkpoint", "_get_train_sampler")),
    ("transformers", Trainer, ("_load_optimizer_and_scheduler", "_load_rng_state")),
    ("transformers", TrainingArguments, ("n_gpu",)),
    ("trl", DPOTrainer, ("_prepare_dataset",)),
    ("trl", KTOTrainer, ("_prepare_dataset",)),
    ("trl", SFTTrainer, ("compute_loss",)),
)
"""What tuner calls, replaces or overrides without a library's promise that it stays."""


def check_names() -> None:
    """Refuse a library in which one of the names is gone that this package replaces: it would go unnoticed.

    Raises:
        MachineError: one is.
    """
    for library, holder, names in _NAMES:
        gone = [name for name in names if not hasattr(holder, name)]
        if gone:
            what = f"{library} {version(library)} has no {holder.__name__}.{gone[0]}, which tuner builds on"
            raise MachineError(what, where=library, fix="Install the tested versions: pip install -r requirements.txt")


def wait_for_ever() -> timedelta:
    """Let no collective end a run by waiting: the watchdog's limit knows of progress, and torch's does not.

    DeepSpeed's own groups take torch's default of 10 minutes (NCCL) or 30, whatever the first group was given.

    Returns:
        How long the first group is to wait.
    """
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = _FOREVER
    return _FOREVER


def build_no_collective() -> None:
    """Keep DeepSpeed from building its shared-memory collective with a C++ compiler (37 s) on a CPU."""
    deepspeed.ops.__compatible_ops__ = {}


def use_one_gpu(settings: TrainingArguments) -> None:
    """Keep Trainer from copying a model to every GPU that it sees, one that is over several GPUs already included."""
    if settings.n_gpu > 1:
        settings._n_gpu = 1


def with_fingerprint(rows: Dataset, more: str) -> Dataset:
    """Return the same rows under another fingerprint, by which TRL keeps what it has computed of them.

    datasets 5.2 takes a new one and has no public name for the old one.
    """
    return rows.select(range(len(rows)), new_fingerprint=f"{rows._fingerprint}-{more}")


def give_config_as_written(trainer: Trainer, zero: dict[str, Any]) -> None:
    """Undo what accelerate adds to the DeepSpeed config: it silences printing, with a value that JSON cannot hold."""
    used = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    used.pop("steps_per_print", None)
    used |= {key: zero[key] for key in ("steps_per_print",) if key in zero}


class ResetStage0Optimizer(TrainerCallback):  # type: ignore[misc]
    """Undo the step with zero gradients that DeepSpeed's stage 0 takes in 16 bits when it is set up.

    It counts in Adam's bias correction, which makes the first updates a quarter smaller than at any ZeRO stage, and it
    decays the weights once (measured on 0.19.8: loss 7.285 instead of 7.257 after one update).
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        wrapper = self.trainer.deepspeed.optimizer
        if state.global_step or not isinstance(wrapper, FP16_UnfusedOptimizer):
            return
        wrapper.optimizer.state.clear()
        for masters, weights in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True):
            for master, weight in zip(masters, weights, strict=True):
                master.data.copy_(weight.data)


def own_optimizer_steps(optimizer: Any) -> None:
    """Give each parameter a step counter of its own, on its device, after a checkpoint was loaded.

    DeepSpeed 0.19.8 puts one tensor, on the CPU, into the states of all ZeRO-3 groups of a universal checkpoint: each
    group's update then counts for all, and a fused optimizer refuses another device.
    """
    for parameter, kept in optimizer.state.items():
        if torch.is_tensor(kept.get("step")):
            kept["step"] = kept["step"].to(parameter.device, copy=True)


class CheckDeepSpeedConfig(TrainerCallback):  # type: ignore[misc]
    """deepspeed.json is what training uses: a library that changed a value on the way is a bug to be seen."""

    def __init__(self, trainer: Any, zero: dict[str, Any]) -> None:
        self.trainer, self.zero = trainer, zero

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        used = self.trainer.deepspeed.config
        differs = {key for key in used.keys() | self.zero.keys() if used.get(key) != self.zero.get(key)}
        assert not differs, f"DeepSpeed was given other values than deepspeed.json holds: {sorted(differs)}"


def check_gradients(engine: Any, on_bad: Callable[[], None]) -> None:
    """Let no update be made of gradients that are no numbers.

    ZeRO's stages, and stage 0 in 16 bits, skip it by themselves (`engine.was_step_applied`), but for stages 1 and 2
    where a config takes the norm away, which is what they see it by. Stage 0 in fp32 looks at nothing: `on_bad` is
    called there, by all ranks, before the update.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "check_grad_overflow"):
        optimizer.check_grad_overflow |= not engine.zero_compute_grad_norm()
    if isinstance(optimizer, torch.optim.Optimizer):  # as it was given: stage 0 in fp32
        _record_grad_norm(engine, on_bad)


def _record_grad_norm(engine: Any, on_bad: Callable[[], None]) -> None:
    """Clip at stage 0 in fp32 by the norm that ZeRO's stages have, and keep it.

    DeepSpeed 0.19.8 adds squares in fp32 there and in fp64 at the other stages (on a CPU its norm is 2e-5 too small),
    and forgets what it found.
    """
    assert hasattr(engine, "clip_fp32_gradients") and hasattr(engine, "_global_grad_norm"), (
        "not known of this DeepSpeed"
    )
    engine.clip_fp32_gradients = lambda: None

    def before_update(*_: Any) -> None:
        weights = [weight for weight in engine.module.parameters() if weight.grad is not None]
        norms = [torch.linalg.vector_norm(weight.grad, dtype=torch.float64) for weight in weights]
        found = torch.linalg.vector_norm(torch.stack(norms))
        engine._global_grad_norm = found.item()
        if not found.isfinite():
            on_bad()
        if engine.gradient_clipping() > 0:
            clip_grads_with_norm_(weights, engine.gradient_clipping(), found)

    engine.optimizer.register_step_pre_hook(before_update)
