"""Where tuner reaches into DeepSpeed, accelerate and transformers: what it mends there, and in which version.

Versions seen: DeepSpeed 0.19.8, accelerate 1.14, transformers 5.23, torch 2.13. It decides nothing about a run.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from accelerate import Accelerator
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch.distributed import distributed_c10d
from torch.nn.utils import clip_grads_with_norm_
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import DPOTrainer, KTOTrainer, SFTTrainer

from tuner.machine.libraries import require_names
from tuner.models import compat as models
from tuner.models.integrity import HEAD
from tuner.worker import compat_checkpoints

_FOREVER = timedelta(days=14)  # milliseconds of it fit 32 bits
BY_SAMPLE = "sdpa_by_sample"
"""The name under which transformers knows `sample_attention`."""


def check_names() -> None:
    """Refuse a library in which one of the names is gone that this package replaces: it would go unnoticed.

    Raises:
        MachineError: one is.
    """
    models.check_names()
    compat_checkpoints.check_names()
    require_names("torch", distributed_c10d, "default_pg_timeout", "default_pg_nccl_timeout")
    require_names("deepspeed", deepspeed.ops, "__compatible_ops__")
    require_names("deepspeed", engine_module, "see_memory_usage")
    require_names("deepspeed", deepspeed, "set_optimizer_flags")
    require_names("deepspeed", DeepSpeedEngine, "clip_fp32_gradients", "was_step_applied")
    require_names("transformers", Trainer, "_save_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state")
    require_names("transformers", Trainer, "_get_train_sampler", "get_sp_size")
    require_names("deepspeed", UlyssesSPAttentionHF, "register_with_transformers")
    require_names("accelerate", Accelerator, "deepspeed_ulysses_dl_adapter")
    require_names("transformers", TrainingArguments, "n_gpu")
    require_names("trl", SFTTrainer, "compute_loss")
    for trainer in (DPOTrainer, KTOTrainer):
        require_names("trl", trainer, "_prepare_dataset")


def train_sampler(trainer: Trainer, rows: Any) -> Any:
    """Return the order of the training rows that an objective's trainer wants (TRL 1.16's KTO has one of its own)."""
    return trainer._get_train_sampler(rows)


def eval_metrics(trainer: Trainer) -> dict[str, list[float]]:
    """Return what TRL 1.16 has measured of the validation since it last logged; its ORPO has another name for it."""
    stored: dict[str, dict[str, list[float]]] = getattr(trainer, "_stored_metrics", None) or trainer._metrics
    return stored["eval"]


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


def on_memory_breakdown(write: Callable[[str], None]) -> None:
    """Have `write` told of each place of a step at which DeepSpeed's `memory_breakdown` would print the memory."""
    engine_module.see_memory_usage = lambda where, force=False: write(where) if force else None


def num_compiled_graphs() -> int:
    """Return how many graphs torch.compile has made in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def use_one_gpu(settings: TrainingArguments) -> None:
    """Keep Trainer from copying a model to every GPU that it sees, one that is over several GPUs already included."""
    if settings.n_gpu > 1:
        settings._n_gpu = 1


def give_config_as_written(trainer: Trainer, zero: dict[str, Any]) -> None:
    """Undo what accelerate adds to the DeepSpeed config: it silences printing, with a value that JSON cannot hold."""
    used = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    used.pop("steps_per_print", None)
    used |= {key: zero[key] for key in ("steps_per_print",) if key in zero}


class ResetStage0Optimizer(TrainerCallback):  # type: ignore[misc]
    """Undo the step with zero gradients that DeepSpeed's stage 0 takes in 16 bits when it is set up.

    It counts in Adam's bias correction, which makes the first updates a quarter smaller than at any ZeRO stage, and it
    decays the weights once (measured on 0.19.8: loss 7.285 instead of 7.257 after one update). DeepSpeed#5104 is about
    the same step of its other optimizers.
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


def attention_of(model: Any) -> str:
    """Return the attention that transformers computes a model with; it has no public name for the one it settled on."""
    name: str = model.config.get_text_config()._attn_implementation
    return name


def takes_mask(model: Any) -> bool:
    """Return whether the attention of a model takes a mask for samples that share a row, and computes all pairs."""
    return attention_of(model) in ("eager", "sdpa", BY_SAMPLE)


def share_samples(trainer: Any, apart: Callable[[Any], Any]) -> None:
    """Let ranks share samples, as accelerate 1.14 asks DeepSpeed's Ulysses to; once a process.

    - Its attention expects as many rows as a micro-batch has, where ours lie end to end in one.
    - accelerate switches it off in eval mode, where we share the rows of a validation.
    - It forgets masks, in the answers after training too, which each rank gives for itself.
    - It counts the key-value heads anew in the layer itself where they are fewer than ranks.
    - Its groups are DeepSpeed's "model parallel" ones too, by which checkpoints get names that no other size reads.
    - Its ranks' gradients are added up at ZeRO-1 and 2, and averaged at 3 (0.19.8: stage3.py, __avg_scatter_grads).
    - Trainer cuts batches up, and counts steps by that; ours come as parts.

    Args:
        apart: Makes of transformers' SDPA one that keeps the samples of a row apart without a mask.
    """
    register = UlyssesSPAttentionHF.register_with_transformers

    @wraps(register)
    def registered(*given: Any, core_attn_implementation: str, micro_batch_size: int, **named: Any) -> SimpleNamespace:
        alone = ALL_ATTENTION_FUNCTIONS[core_attn_implementation]
        if core_attn_implementation == "sdpa":
            ALL_ATTENTION_FUNCTIONS["sdpa"] = apart(alone)
        named |= {"micro_batch_size": 1, "disable_in_eval": False}
        groups = register(*given, core_attn_implementation=core_attn_implementation, **named)
        together = ALL_ATTENTION_FUNCTIONS[core_attn_implementation]
        ALL_ATTENTION_FUNCTIONS[core_attn_implementation] = partial(_attend, trainer, together, alone)
        num_groups = dist.get_world_size() // groups.get_sequence_parallel_world_size()
        itself, _ = dist.new_subgroups(1)
        own = {
            "get_data_parallel_world_size": lambda: num_groups,  # by which the batch is checked
            "get_model_parallel_group": lambda: itself,  # over which stage 0 adds up the gradient's norm
            "get_model_parallel_rank": lambda: 0,
            "get_model_parallel_world_size": lambda: 1,
            "get_sequence_parallel_world_size": lambda: 1,  # all ranks' gradients are averaged
        }
        return SimpleNamespace(**vars(groups) | own)

    UlyssesSPAttentionHF.register_with_transformers = registered
    trainer.accelerator.deepspeed_ulysses_dl_adapter = lambda loader, _: loader
    trainer.get_sp_size = lambda: 1


def _attend(trainer: Any, together: Any, alone: Any, module: Any, *given: Any, **named: Any) -> Any:
    if not (module.training or trainer.is_evaluating):
        return alone(module, *given, **named)
    groups = getattr(module, "num_key_value_groups", None)
    found = together(module, *given, **named)
    if groups is not None:
        module.num_key_value_groups = groups
    return found


class CheckDeepSpeedConfig(TrainerCallback):  # type: ignore[misc]
    """deepspeed.json is what training uses: a library that changed a value on the way is a bug to be seen."""

    def __init__(self, trainer: Any, zero: dict[str, Any]) -> None:
        self.trainer, self.zero = trainer, zero

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        used = self.trainer.deepspeed.config
        differs = {key for key in used.keys() | self.zero.keys() if used.get(key) != self.zero.get(key)}
        assert not differs, f"DeepSpeed received values that differ from deepspeed.json: {sorted(differs)}"


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


def keep_muon_off_embeddings(model: Any) -> None:
    """Let Adam train a model's embeddings and head, whatever an architecture calls them.

    DeepSpeed 0.19.8 knows them by "embed" and "lm_head" in their names; GPT-2's are `wte`, InternLM2's head is
    `output`, a reward model's `score`: Muon would make each of their updates orthogonal.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings(), getattr(model, HEAD, None))
    weights = [weight for module in ends if module is not None for weight in module.parameters()]
    flag = deepspeed.set_optimizer_flags

    def flag_all(*given: Any) -> None:
        flag(*given)
        for weight in weights:
            weight.use_muon = False

    deepspeed.set_optimizer_flags = flag_all
