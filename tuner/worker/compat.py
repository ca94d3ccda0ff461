"""The private parts of DeepSpeed, accelerate and transformers that tuner uses or repairs, each with its version.

Seen with DeepSpeed 0.19.8, accelerate 1.15, transformers 5.24 and torch 2.13. It decides nothing about a run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from importlib import import_module
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from accelerate import Accelerator
from deepspeed.runtime import bf16_optimizer, compiler
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from torch.distributed import distributed_c10d
from torch.nn.utils import clip_grads_with_norm_
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import DPOTrainer, KTOTrainer, SFTTrainer

from tuner.files import JsonObject
from tuner.machine.libraries import replaced, require_names
from tuner.models import attention
from tuner.models import compat as models
from tuner.models.compat_experts import packed_in
from tuner.models.integrity import HEAD
from tuner.recipes.schema.architecture import VARLEN
from tuner.worker import (
    compat_checkpoints,
    compat_expert_parallel,
    compat_loss,
    compat_tensor_parallel,
    compat_update,
    experts,
)
from tuner.worker.trainer_types import Attention, BuiltTrainer, EngineOptimizer

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor, nn
    from torch.utils.data import Sampler
    from transformers import PreTrainedModel

_FOREVER = timedelta(days=14)  # milliseconds of it fit 32 bits
_RELEASES = "_PartitionedParameterCoordinator__params_to_release"


NAMES: tuple[tuple[Any, ...], ...] = (
    ("torch", distributed_c10d, "default_pg_timeout", "default_pg_nccl_timeout"),
    ("torch", torch.cuda, "_is_in_bad_fork"),
    # It makes the table when that is first read, with a C compiler: look for the maker, in every rank.
    ("deepspeed", deepspeed.ops, "_probe_compatible_ops"),
    ("deepspeed", engine_module, "see_memory_usage"),
    ("deepspeed", bf16_optimizer, "see_memory_usage"),
    ("deepspeed", deepspeed, "set_optimizer_flags"),
    ("deepspeed", compiler, "compile"),
    ("deepspeed", DeepSpeedEngine, "clip_fp32_gradients", "was_step_applied"),
    ("deepspeed", PartitionedParameterCoordinator, _RELEASES, "construct_parameter_trace_from_module_trace"),
    ("deepspeed", DeepSpeedZeRoOffload, "_register_deepspeed_module"),  # it looks for `pre_bwd_fn`
    ("deepspeed", UlyssesSPAttentionHF, "register_with_transformers"),
    ("accelerate", Accelerator, "deepspeed_ulysses_dl_adapter"),
    ("transformers", Trainer, "_save_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state"),
    ("transformers", Trainer, "_get_train_sampler", "_prepare_inputs", "get_sp_size"),
    ("transformers", TrainingArguments, "n_gpu"),
    ("transformers", masking_utils, "find_packed_sequence_indices"),
    ("trl", SFTTrainer, "compute_loss"),
    ("trl", DPOTrainer, "_prepare_dataset"),
    ("trl", KTOTrainer, "_prepare_dataset"),
)
"""Of each `compat` module: what it replaces or calls without a library's promise, as `require_names` takes it."""
_PARTS = (models, compat_checkpoints, compat_update, compat_loss, compat_tensor_parallel, compat_expert_parallel)


def check_names() -> None:
    """Refuse a library without one of the names that this package replaces: replacing it would have no effect.

    Raises:
        MachineError: a name is missing.
    """
    for names in chain(NAMES, *(part.NAMES for part in _PARTS)):
        require_names(*names)


def may_use_cuda() -> bool:
    """Return whether this process was forked from none that has initialized CUDA; without a GPU that is always so."""
    return not torch.cuda._is_in_bad_fork()


def train_sampler(trainer: Trainer, rows: Dataset) -> Sampler[int]:
    """Return the sampler of the training rows (TRL 1.16's KTO trainer has its own)."""
    sampler: Sampler[int] = trainer._get_train_sampler(rows)
    return sampler


def class_that_generates(trainer: type[Trainer]) -> type[Trainer]:
    """Return the class of TRL 1.16, among the bases of a trainer, in whose module completions are generated."""
    of_trl = [base for base in trainer.__mro__ if base.__module__.startswith("trl.")]
    return next((base for base in of_trl if "_generate_and_score_completions" in vars(base)), of_trl[0])


_OF_TRAINERS = {
    "generates": ("_generate_and_score_completions", "_generate_single_turn", "_tokenize_prompts"),
    "calls tools": ("_tool_call_loop", "_get_tool_suffix_ids"),
    "compares": ("_get_last_hidden_state", "_compute_loss"),
}


def check_trainer(trainer: type[Trainer], does: Literal["generates", "calls tools", "compares"]) -> None:
    """Refuse a trainer that does not do something as TRL 1.16 does; it compares in distillation. As `check_names`."""
    require_names("trl", trainer, *_OF_TRAINERS[does])


def log_probs_of_completions(trainer: Any, model: Any, inputs: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log-probabilities and entropies of the tokens of completions, [B, C], as TRL 1.16's GRPOTrainer does.

    The last is the loss of a mixture of experts' router, or None.
    """
    both = (torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], dim=1) for name in ("ids", "mask"))
    options = {"compute_entropy": True, "compute_aux_loss": trainer.aux_loss_enabled}
    values: tuple[Tensor, Tensor, Tensor | None] = trainer._get_per_token_logps_and_entropies(
        model, *both, inputs["completion_ids"].shape[1], **options
    )
    return values


def last_states(trainer: Any, model: Any, ids_BT: Tensor, mask_BT: Tensor, num_kept: int) -> Tensor:
    """Return the hidden states from which TRL 1.16 predicts the last tokens in a distillation, [B, kept, H]."""
    states: Tensor = trainer._get_last_hidden_state(model, ids_BT, mask_BT, num_kept)
    return states


def through_engine(trainer: Any, engine: Any, model: Any, call: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Return the result of a call inside the forward pass of the engine around a model, which gathers its weights."""
    result: Tensor = trainer._forward_redirection(engine, model, call, *arguments)
    return result


def keep_order(trainer: type[Trainer]) -> None:
    """Keep the completions that TRL 1.16 generated at once in their order; it would shuffle those of each rank."""
    module = sys.modules[trainer.__module__]
    require_names("trl", module, "shuffle_sequence_dict")
    module.shuffle_sequence_dict = lambda completions: completions  # type: ignore[attr-defined]


def metrics_of(trainer: Trainer, mode: str) -> dict[str, list[float]]:
    """Return TRL 1.16's metrics of training ('train') or of the validation ('eval') since their last log."""
    # ORPO's trainer stores them under another name.
    stored: dict[str, dict[str, list[float]]] = getattr(trainer, "_stored_metrics", None) or trainer._metrics
    return stored[mode]


def completions_of_step(trainer: Any) -> tuple[int, list[dict[str, Tensor]]]:
    """Return the number of the step and its micro-batches on this rank, as TRL 1.16 keeps the generated completions."""
    num_batches = trainer.current_gradient_accumulation_steps
    step = trainer._step // num_batches
    start = step * num_batches % trainer.args.steps_per_generation
    return step, trainer._buffered_inputs[start : start + num_batches]


def last_completions(trainer: Trainer) -> Any:
    """Return what TRL 1.16 keeps of the last completions of all ranks: prompts, texts, rewards by name, advantages."""
    return trainer._logs


def wait_for_ever() -> timedelta:
    """Raise torch's default timeout, and return it: no collective ends a run, for only the watchdog knows of progress.

    DeepSpeed's own groups take torch's default of 10 minutes (NCCL) or 30, whatever timeout the first group has.
    """
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = _FOREVER
    return _FOREVER


def build_no_collective() -> None:
    """Keep DeepSpeed from building its shared-memory collective with a C++ compiler (37 s) on a CPU."""
    deepspeed.ops.__compatible_ops__ = {}


def import_muon_without_compiler() -> None:
    """Import DeepSpeed's Muon without torch's compiler.

    Each rank with ZeRO imports it, to see whether its optimizer is Muon, and the decorators of its functions import
    the compiler with 650 modules: half of the CPU time of a short run (DeepSpeed 0.19.8). A run of Muon needs them.
    """
    with replaced(compiler, compile=lambda: lambda function: function):
        import_module("deepspeed.runtime.zero.muon.original_muon")


def renew_releases() -> None:
    """Let ZeRO-3 decide anew what it frees after a module whenever the order of a step's modules changes.

    DeepSpeed 0.19.8 keeps that decision for ever (`lru_cache`): after a forward pass before the first step, or after a
    validation, training frees weights that its backward pass gathers again, and never gathers them ahead.
    """
    make_trace = PartitionedParameterCoordinator.construct_parameter_trace_from_module_trace
    decision = vars(PartitionedParameterCoordinator)[_RELEASES]
    cached = [cell.cell_contents for cell in decision.__closure__ or () if hasattr(cell.cell_contents, "cache_clear")]

    def forgetting(coordinator: PartitionedParameterCoordinator) -> None:
        for function in cached:
            function.cache_clear()
        make_trace(coordinator)

    PartitionedParameterCoordinator.construct_parameter_trace_from_module_trace = forgetting


def know_moved_weights(model: nn.Module) -> None:
    """Let ZeRO-3 find the weights of experts and routers that have LoRA while PEFT has moved them.

    In a pass of their module PEFT 0.21 keeps them in a parametrization, and DeepSpeed 0.19.8 makes its trace after the
    pass, when they are back: it ends in a "tracing error" at the first module before which nothing was gathered ahead.
    """
    for wrapper in model.modules():
        if isinstance(wrapper, ParamWrapper):
            module = wrapper.get_base_layer()
            weight = dict(module.named_parameters(recurse=False)).get(wrapper.parameter_name)
            if weight is not None:  # one in 4 bits is never there
                deepspeed.zero.register_external_parameter(module, weight)


def unpack_in_forward_alone(model: nn.Module) -> None:
    """Keep ZeRO-3 from gathering experts in 4 bits for a backward pass, which reads their unpacked values alone.

    DeepSpeed 0.19.8 gathers the weights of a module before the backward pass of its output, and frees them after that
    of its inputs. Where LoRA is added, the output has a gradient; a parametrization has no inputs. So the packed
    experts of each layer stayed gathered until the whole backward pass was over.
    """
    for packed in packed_in(model):
        # DeepSpeed makes its function for a module that has none of this name.
        packed.module.parametrizations[packed.name].pre_bwd_fn = SimpleNamespace(apply=lambda output: output)


def print_no_memory() -> None:
    """Keep DeepSpeed's optimizer for bf16 without ZeRO from printing the memory when it is built."""
    bf16_optimizer.see_memory_usage = lambda message, force=False: None


def on_memory_breakdown(write: Callable[[str], None]) -> None:
    """Call `write` with each place of a step at which DeepSpeed's `memory_breakdown` would print the memory."""
    engine_module.see_memory_usage = lambda where, force=False: write(where) if force else None


def num_compiled_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def use_one_gpu(arguments: TrainingArguments) -> None:
    """Keep the Trainer from copying a model to every GPU, also a model that already spans several GPUs."""
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1


def give_config_as_written(trainer: BuiltTrainer, zero: JsonObject) -> None:
    """Undo accelerate's change of the DeepSpeed config: it stops printing by a value that JSON cannot hold."""
    used = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    used.pop("steps_per_print", None)
    used |= {key: zero[key] for key in ("steps_per_print",) if key in zero}


class PrepareEngine(TrainerCallback):  # type: ignore[misc]
    """Checks and mends the engine that the Trainer has made, before the first step."""

    def __init__(self, trainer: BuiltTrainer, zero: JsonObject) -> None:
        self.trainer, self.zero = trainer, zero

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        engine = self.trainer.deepspeed
        used = compat_tensor_parallel.as_written(engine.config, self.zero)
        differs = {key for key in used.keys() | self.zero.keys() if used.get(key) != self.zero.get(key)}
        # A library that changes a value is a bug.
        assert not differs, f"DeepSpeed received values that differ from deepspeed.json: {sorted(differs)}"
        if not state.global_step and isinstance(engine.optimizer, FP16_UnfusedOptimizer):
            _reset_stage_0(engine.optimizer)
        compat_update.step_at_once(engine)
        compat_update.spare_walks(engine)
        compat_update.spare_timer(engine)


def _reset_stage_0(wrapper: EngineOptimizer) -> None:
    """Undo the step with zero gradients that DeepSpeed's stage 0 takes in 16 bits during its setup.

    The step counts in Adam's bias correction, so the first updates are a quarter smaller than at any ZeRO stage, and it
    decays the weights once (measured on 0.19.8: loss 7.285 instead of 7.257 after one update). DeepSpeed#5104 reports
    the same step in its other optimizers.
    """
    wrapper.optimizer.state.clear()
    for masters, weights in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.data.copy_(weight.data)


def give_defaults(optimizer: object) -> None:
    """Give DeepSpeed's optimizer the `defaults` of the one that it wraps.

    transformers 5.24 reads the rate of the polynomial schedule there, and DeepSpeed 0.19.8's optimizers of ZeRO 1 to 3,
    and of stage 0 in 16 bits, have no such attribute.
    """
    wrappers = [optimizer]
    while (inner := getattr(wrappers[-1], "optimizer", None)) is not None:
        wrappers.append(inner)
    for wrapper in wrappers[:-1]:
        if not hasattr(wrapper, "defaults"):
            wrapper.defaults = wrappers[-1].defaults  # type: ignore[attr-defined]


def own_optimizer_steps(optimizer: EngineOptimizer) -> None:
    """Give each parameter its own step counter on its device after a checkpoint was loaded.

    DeepSpeed 0.19.8 puts one tensor on the CPU into the states of all ZeRO-3 groups of a universal checkpoint: the
    update of one group then counts for all groups, and a fused optimizer refuses a tensor on another device.
    """
    for parameter, state in optimizer.state.items():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].to(parameter.device, copy=True)


@contextmanager
def knowing(*, are_packed: bool) -> Iterator[None]:
    """Tell transformers whether the rows of a batch without a mask hold several samples each.

    transformers 5.24 asks the positions, for which it waits for the GPU once or twice in each forward pass.
    """
    with replaced(masking_utils, find_packed_sequence_indices=_samples_of if are_packed else lambda _: None):
        yield


def _samples_of(position_ids: Tensor) -> Tensor:
    """Return the number of each token's sample in its row, [B, T]; a sample begins where the position does not grow."""
    before = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=before, dim=-1) != 1).cumsum(-1)


def attention_of(model: PreTrainedModel) -> str:
    """Return the name of the attention that transformers chose for a model; it has no public attribute for it."""
    name: str = model.config.get_text_config()._attn_implementation
    return name


def needs_mask(model: PreTrainedModel) -> bool:
    """Return whether the attention of a model computes all pairs of tokens and separates samples by a mask."""
    return attention_of(model) in ("eager", "sdpa")


def takes_mask(model: PreTrainedModel) -> bool:
    """Return whether the attention of a model computes rows that are padded on the left, with a mask."""
    return needs_mask(model) or attention_of(model) == VARLEN


def share_samples(trainer: BuiltTrainer) -> None:
    """Repair how accelerate 1.14 and DeepSpeed's Ulysses let ranks share samples; call it once per process.

    - Ulysses expects as many rows as a micro-batch has; our samples lie end to end in one row.
    - accelerate switches Ulysses off in eval mode; we share the rows of a validation too.
    - Ulysses drops masks, also in the answers after training, which each rank computes alone.
    - Ulysses changes the number of key-value heads in the layer if there are fewer heads than ranks.
    - Ulysses' groups also become DeepSpeed's "model parallel" groups: then checkpoints get file names that a run with
      another group size cannot read.
    - DeepSpeed sums the gradients of the group at ZeRO-1 and 2, and averages them at 3 (0.19.8: stage3.py,
      __avg_scatter_grads).
    - The Trainer splits batches itself and counts steps by that; ours are already split.
    - A rank's heads are a part of the layer's, and so are the sinks of these heads (gpt-oss).
    - The loss that balances a router is that of a rank's tokens; that of the whole row is another.
    """
    register = UlyssesSPAttentionHF.register_with_transformers

    @wraps(register)
    def registered(
        model_name_or_path: PreTrainedModel, *args: object, core_attn_implementation: str, **options: object
    ) -> SimpleNamespace:
        model, name = model_name_or_path, attention_of(model_name_or_path)
        alone = ALL_ATTENTION_FUNCTIONS[name]
        if name in ("sdpa", VARLEN):
            ALL_ATTENTION_FUNCTIONS[name] = _attend_with_own_sinks  # which needs no mask of all pairs
        options |= {"micro_batch_size": 1, "disable_in_eval": False, "core_attn_implementation": name}
        groups = register(model, *args, **options)
        together = ALL_ATTENTION_FUNCTIONS[name]
        ALL_ATTENTION_FUNCTIONS[name] = partial(_attend, trainer, together, alone)
        model = model.get_base_model() if isinstance(model, PeftModel) else model
        experts.balance_whole_rows(model, groups.get_sequence_parallel_group())
        num_groups = dist.get_world_size() // groups.get_sequence_parallel_world_size()
        itself, _ = dist.new_subgroups(1)
        replacements = {
            "get_data_parallel_world_size": lambda: num_groups,  # the check of the batch size uses it
            "get_model_parallel_group": lambda: itself,  # stage 0 sums the norm of the gradient over it
            "get_model_parallel_rank": lambda: 0,
            "get_model_parallel_world_size": lambda: 1,
            "get_sequence_parallel_world_size": lambda: 1,  # all ranks' gradients are averaged
        }
        return SimpleNamespace(**vars(groups) | replacements)

    UlyssesSPAttentionHF.register_with_transformers = registered
    trainer.accelerator.deepspeed_ulysses_dl_adapter = lambda loader, _: loader
    trainer.get_sp_size = lambda: 1


def _attend_with_own_sinks(
    module: torch.nn.Module, query: Tensor, *args: Any, s_aux: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    if s_aux is not None:
        num_parts = len(s_aux) // query.shape[1]
        s_aux = s_aux.chunk(num_parts)[dist.get_rank() % num_parts]
    return attention.attend(module, query, *args, s_aux=s_aux, **options)


def _attend(
    trainer: BuiltTrainer,
    together: Attention,
    alone: Attention,
    module: torch.nn.Module,
    *args: object,
    **options: object,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention over all ranks of a group in training and validation, and on this rank alone otherwise."""
    if not (module.training or trainer.is_evaluating):
        return alone(module, *args, **options)
    groups = getattr(module, "num_key_value_groups", None)
    result = together(module, *args, **options)
    if groups is not None:
        module.num_key_value_groups = groups
    return result


def check_gradients(engine: DeepSpeedEngine, on_bad: Callable[[], None]) -> None:
    """Prevent updates from gradients that are not finite.

    ZeRO's stages, and stage 0 in 16 bits, skip such an update by themselves (`engine.was_step_applied`). Stages 1 and 2
    see it by the norm, so the check is switched on if the config leaves out the norm. Stage 0 in fp32 checks nothing:
    there all ranks call `on_bad` before the update.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "check_grad_overflow"):
        optimizer.check_grad_overflow |= not engine.zero_compute_grad_norm()
    if isinstance(optimizer, torch.optim.Optimizer):  # not wrapped: stage 0 in fp32
        _record_grad_norm(engine, on_bad)


def _record_grad_norm(engine: DeepSpeedEngine, on_bad: Callable[[], None]) -> None:
    """Clip gradients at stage 0 in fp32 by the same norm as at ZeRO's stages, and store the norm.

    DeepSpeed 0.19.8 sums squares in fp32 there and in fp64 at the other stages (on a CPU its norm is 2e-5 too small),
    and does not store the norm.
    """
    assert hasattr(engine, "_global_grad_norm"), "this DeepSpeed has other names"
    engine.clip_fp32_gradients = lambda: None

    def before_update(*_: object) -> None:
        weights = [weight for weight in engine.module.parameters() if weight.grad is not None]
        if engine.autotp_size() > 1 or engine.has_moe_layers:
            norm = _norm_of_groups(engine, weights)
        else:
            norms = [torch.linalg.vector_norm(weight.grad, dtype=torch.float64) for weight in weights]
            norm = torch.linalg.vector_norm(torch.stack(norms))
        engine._global_grad_norm = norm.item()
        if not norm.isfinite():
            on_bad()
        if engine.gradient_clipping() > 0:
            clip_grads_with_norm_(weights, engine.gradient_clipping(), norm)

    engine.optimizer.register_step_pre_hook(before_update)


def _norm_of_groups(engine: DeepSpeedEngine, weights: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of the gradients of all weights, in fp64: parts of one weight count together, copies once."""
    parts = compat_expert_parallel if engine.has_moe_layers else compat_tensor_parallel
    squares_2 = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for weight in weights:
        squares_2[int(parts.is_part(weight))] += torch.linalg.vector_norm(weight.grad, dtype=torch.float64) ** 2
    dist.all_reduce(squares_2[1:], group=parts.group_of(engine))
    return squares_2.sum().sqrt()


def keep_muon_off_embeddings(model: PreTrainedModel) -> None:
    """Let Adam train the embeddings and the head of a model, whatever the architecture calls them.

    DeepSpeed 0.19.8 recognizes them by "embed" and "lm_head" in their names. GPT-2's embeddings are `wte`, InternLM2's
    head is `output`, and a reward model's is `score`: Muon would make each of their updates orthogonal.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings(), getattr(model, HEAD, None))
    weights = [weight for module in ends if module is not None for weight in module.parameters()]
    flag = deepspeed.set_optimizer_flags

    def flag_all(*args: object) -> None:
        flag(*args)
        for weight in weights:
            weight.use_muon = False

    deepspeed.set_optimizer_flags = flag_all
