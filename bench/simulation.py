"""The memory of one training step, without a GPU: the libraries themselves run on meta tensors, which hold no data.

transformers' model, PEFT, bitsandbytes, TRL's loss and DeepSpeed's engine take real steps, and every storage that they
hold on the GPU is counted. No formula is used, and nothing of `tuner.fit`, which is checked against this.

Stand-ins replace what meta tensors lack: the other ranks (`Ranks`), a device (`GpuOfMeta`), and of
`tuner.lab.compat_meta_tensors` values (`Memory`) and the kernels that torch has for GPUs alone (`GpuKernels`). Not
counted:
what a kernel allocates inside, CUDA's context, NCCL's buffers, the allocator's gaps, and memory that is freed late
because another stream used it.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from unittest import mock

import bitsandbytes.functional
import deepspeed
import torch
import torch.nn.functional as F
from bitsandbytes.nn import Params4bit
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.comm import comm
from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PreTrainedConfig,
    Trainer,
    masking_utils,
)
from transformers.initialization import no_init_weights
from transformers.integrations import sdpa_attention
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.models.llava import modeling_llava
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.quantizers.base import HfQuantizer
from trl.trainer.utils import add_fused_lm_head

from bench.gpu_loss import as_on_a_gpu
from tuner.lab.compat_meta_tensors import META, GpuKernels, Memory, without_autocast
from tuner.models.attention import register
from tuner.models.compat import name_parts, repeat_heads_on_old_gpus
from tuner.models.compat_experts import fused_in, has_experts, open_to_peft, pack, packed_in
from tuner.models.load import limit_input_gradients
from tuner.models.mixers import keep_samples_apart
from tuner.models.vision import lora_targets
from tuner.recipes.schema import Adapter
from tuner.recipes.schema.architecture import VARLEN
from tuner.worker.compat import know_moved_weights, unpack_in_forward_alone
from tuner.worker.loss import compute_once, use_whole_logits

IMAGE_TOKENS_OF_A_SIDE = 24
"""An image that may have any size has the square of this many tokens."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_METRICS = ("entropy", "is_top1")
"""What `tuner.worker.loss` measures in a step that is logged."""
_FILES = {
    "/deepspeed/runtime/zero/linear.py": "layers",
    "/deepspeed/runtime/zero/partition": "gathered",
    "/deepspeed/runtime/engine.py": "",
    "/deepspeed/utils/": "",
    "/deepspeed/": "buckets",
    "/trl/": "loss",
    "/tuner/worker/loss.py": "loss",
    "/transformers/": "layers",
    "/peft/": "layers",
    "/bitsandbytes/": "layers",
}
"""The line of a tensor by the innermost caller; callers named '' are skipped."""


@dataclass(frozen=True)
class Job:
    """What one rank trains: everything that its memory depends on."""

    config: PreTrainedConfig
    deepspeed: Mapping[str, Any]
    """The final deepspeed.json."""
    ranks: int
    rows: int
    row_tokens: int
    is_packed: bool = False
    """Rows hold several samples each, which attention keeps apart by their positions."""
    recompute: bool = False
    loss: str = "chunked"
    attention: str | None = None
    adapter: Mapping[str, Any] | None = None
    """Arguments of `LoraConfig`; `vision`: on the tower and the projector too."""
    quantization: Mapping[str, Any] | None = None
    """Arguments of `BitsAndBytesConfig`, for 4 bits."""
    packs_experts: bool = False
    """Experts are in 4 bits too."""
    capability: tuple[int, int] = (8, 0)
    rank: int = 0
    num_images: int = 0
    """Images of a LLaVA in each row, which begins with their tokens."""

    @property
    def stage(self) -> int:
        return int(self.deepspeed.get("zero_optimization", {}).get("stage", 0))

    @property
    def dtype(self) -> torch.dtype:
        names = (name for name in _DTYPES if self.deepspeed.get(name, {}).get("enabled"))
        return _DTYPES.get(next(names, ""), torch.float32)


@dataclass(frozen=True)
class Simulated:
    """The peak of a step in bytes of one GPU: all of it, its lines, and the part of the step that it is in."""

    peak: int
    lines: Mapping[str, int]
    moment: str


def simulate(job: Job) -> Simulated:
    """Take two optimizer steps on meta tensors and return the peak of the second.

    The first makes the optimizer's states, and ZeRO-3 learns the order of the layers in it.
    """
    with _stand_ins(job) as memory:
        with torch.device(META), no_init_weights():
            model = build(job)
        memory.phase = "optimizer_states"
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer_of(model), config=_with_any_optimizer(job), dist_init_required=False
        )
        gc.collect()
        step(engine, job, META, memory.enter)
        weights = {tensor.untyped_storage()._cdata for tensor in _weights(model)}
        memory.relabel(lambda address: "weights" if address in weights else "optimizer_states")
        memory.begin()
        step(engine, job, META, memory.enter)
        result = Simulated(memory.peak, {name: size for name, size in memory.at_peak.items() if size}, memory.moment)
        engine.destroy()
        del engine, model
        gc.collect()
    return result


def _with_any_optimizer(job: Job) -> dict[str, Any]:
    """Return the config for torch's Adam on the host, in the place of DeepSpeed's, which is compiled."""
    return {**job.deepspeed, "zero_force_ds_cpu_optimizer": False}


# What is trained, as tuner's worker sets it up; on the CPU it is the same with real tensors.


def build(job: Job) -> Any:
    """Return the model with its adapter, ready to train, on the current default device."""
    auto = AutoModelForImageTextToText if job.num_images else AutoModelForCausalLM
    register()
    model: Any = auto.from_config(job.config, dtype=job.dtype, attn_implementation=job.attention)
    model.tie_weights()
    name_parts(model)
    keep_samples_apart(model)
    model.config.use_cache = False
    if job.quantization:
        _quantize(model, job)
    text = model.config.get_text_config()
    if hasattr(text, "output_router_logits"):
        text.output_router_logits = bool(getattr(text, "router_aux_loss_coef", 0))
    add_fused_lm_head(model, outputs=("log_probs", *_METRICS))
    compute_once(model, _METRICS)
    if job.loss == "whole":
        use_whole_logits(model, _METRICS)
    model.train()
    trained = model
    if job.adapter:
        settings = dict(job.adapter)
        on_tower = settings.pop("vision", False)
        if job.num_images:
            settings["target_modules"] = lora_targets(model, Adapter(**settings, vision=on_tower))
        lora = LoraConfig(task_type="CAUSAL_LM", **settings)
        with open_to_peft(model):
            trained = get_peft_model(model, lora, autocast_adapter_dtype=False)
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(job.dtype)
        if job.stage == 3:
            know_moved_weights(trained)
            unpack_in_forward_alone(trained)
    if job.recompute:
        # TRL 1.16 takes reentrant checkpoints for an adapter at ZeRO-3 (sft_trainer.py), tuner not for experts.
        is_reentrant = bool(job.adapter) and job.stage == 3 and not has_experts(model)
        limit_input_gradients(model, reads_images=job.num_images > 0, is_reentrant=is_reentrant)
        model.activation_checkpointing_enable({"use_reentrant": is_reentrant})
    return trained


def _quantize(model: Any, job: Job) -> None:
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=job.dtype, **(job.quantization or {}))
    whole = HfQuantizer.get_modules_to_not_convert(model, None, None, add_default_skips=True)
    before = {name: module.weight.data for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    replace_with_bnb_linear(model, modules_to_not_convert=whole, quantization_config=config)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and hasattr(module.weight, "quant_state"):
            settings = vars(module.weight)
            module.weight = Params4bit(before[name], requires_grad=False, **settings)._quantize(before[name].device)
    if job.packs_experts:
        for module in model.modules():
            if fused := fused_in(module):
                pack(module, {name: _in_4_bits(weight.data, config) for name, weight in fused.items()})
    model.requires_grad_(False)
    model.is_loaded_in_4bit = model.is_quantized = True


def _in_4_bits(weight: Tensor, config: BitsAndBytesConfig) -> tuple[Tensor, Any]:
    found: tuple[Tensor, Any] = bitsandbytes.functional.quantize_4bit(
        weight, compress_statistics=config.bnb_4bit_use_double_quant, quant_type=config.bnb_4bit_quant_type
    )
    return found


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """Return AdamW over transformers' two groups of weights."""
    return torch.optim.AdamW([{"params": group} for group in _groups(model) if group], fused=True)


def _groups(model: Any) -> list[list[Tensor]]:
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    return [[weight for name, weight in trained.items() if (name in decayed) is half] for half in (True, False)]


def rank_at_largest(job: Job) -> int:
    """Return the rank whose share is a part of the largest weights, all together: stage 2 keeps their whole gradients.

    Stages 1 and 2 lay the weights of a group end to end, and divide them by the number of ranks.
    """
    with torch.device(META), no_init_weights():
        groups = _groups(build(job))
    whole = [0] * job.ranks
    for group in groups:
        ends = [*accumulate(weight.numel() for weight in group)]
        share = -(-ends[-1] // job.ranks) if ends else 1
        for weight, end in zip(group, ends, strict=True):
            for rank in range((end - weight.numel()) // share, (end - 1) // share + 1):
                whole[rank] += weight.numel()
    return whole.index(max(whole))


def step(engine: Any, job: Job, device: str, enter: Callable[[str], None] = lambda phase: None) -> None:
    """Take one optimizer step; `enter` is told the part of it that begins."""
    for _ in range(job.deepspeed["gradient_accumulation_steps"]):
        enter("forward")
        loss = _loss(engine, job, device)
        enter("backward")
        engine.backward(loss)
        del loss
        enter("step")
        engine.step()


def _loss(engine: Any, job: Job, device: str) -> Tensor:
    """Return the loss as `tuner.worker.objectives.sft_training.Sft` computes it."""
    shape = (job.rows, job.row_tokens)
    text = engine.module.config.get_text_config()
    batch = {"input_ids": torch.randint(0, text.vocab_size, shape, device=device)}
    batch["labels"] = batch["input_ids"]
    if job.is_packed:
        batch["position_ids"] = torch.arange(job.row_tokens, device=device).remainder(job.row_tokens // 2).expand(shape)
    if job.attention == VARLEN:
        batch |= {
            "cu_seq_lens_q": torch.zeros(3, dtype=torch.int32, device=device),
            "max_length_q": job.row_tokens // 2,
        }
    if job.num_images:
        batch |= _images(job, device)
    outputs = engine(**batch, use_cache=False, fused_lm_head=True, num_trained=job.rows * (job.row_tokens - 1))
    loss: Tensor = outputs.loss / math.prod(shape)
    return loss if outputs.aux_loss is None else loss + text.router_aux_loss_coef * outputs.aux_loss


def _images(job: Job, device: str) -> dict[str, Tensor]:
    """Return the pixels of the images of a micro-batch, as the processor of the model makes them."""
    tower, number = job.config.vision_config, job.rows * job.num_images
    if side := getattr(tower, "image_size", None):
        return {"pixel_values": torch.empty((number, 3, side, side), dtype=job.dtype, device=device)}
    patches = 2 * IMAGE_TOKENS_OF_A_SIDE
    pixels = 3 * tower.temporal_patch_size * tower.patch_size**2
    return {
        "pixel_values": torch.empty((number * patches**2, pixels), dtype=job.dtype, device=device),
        "image_grid_thw": torch.tensor([[1, patches, patches]] * number),
        "position_ids": torch.empty((3, job.rows, job.row_tokens), dtype=torch.long, device=device),
    }


def _weights(model: Any) -> Iterator[Tensor]:
    """Yield the tensors that keep the weights: whole ones, ZeRO-3's share of them, and the scales of 4-bit ones."""
    experts = [packed.state for packed in packed_in(model)]
    tensors = [*model.parameters(), *model.buffers()]
    yield from (getattr(tensor, "ds_tensor", tensor.data) for tensor in tensors)
    for state in (*experts, *(getattr(tensor, "quant_state", None) for tensor in tensors)):
        while state is not None:
            yield from (part for part in (state.absmax, state.code, state.offset) if part is not None)
            state = state.state2


# A GPU's device and the other ranks.


class GpuOfMeta(CPU_Accelerator):  # type: ignore[misc]
    """DeepSpeed's accelerator whose tensors are meta tensors. It has no streams."""

    def device_name(self, device_index: int | None = None) -> str:
        return META

    def current_device_name(self) -> str:
        return META

    def current_device(self) -> str:
        return META

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(META)

    def on_accelerator(self, tensor: Tensor) -> bool:
        return bool(tensor.is_meta)

    def is_fp16_supported(self) -> bool:
        return True

    def available_memory(self, device_index: int | None = None) -> int:
        return sys.maxsize


class _Done:
    def wait(self, *_: Any) -> None: ...

    def is_completed(self) -> bool:
        return True


class Ranks:
    """DeepSpeed's backend for collectives, of one rank. Of the others only the number exists: nothing is sent."""

    using_mpi = False

    def __init__(self, number: int, rank: int) -> None:
        self.number, self.rank = number, rank

    def is_initialized(self) -> bool:
        return True

    def get_rank(self, group: Any = None) -> int:
        return self.rank if group in (None, "world") else 0

    def get_world_size(self, group: Any = None) -> int:
        return self.number if group in (None, "world") else len(group)

    def get_world_group(self) -> str:
        return "world"

    def get_global_rank(self, group: Any = None, group_rank: int = 0) -> int:
        return group_rank

    def new_group(self, ranks: Any) -> Any:
        return "world" if len(ranks) == self.number else tuple(ranks)

    def get_backend(self, group: Any = None) -> str:
        return "nccl"

    def has_all_gather_into_tensor(self) -> bool:
        return True

    def has_reduce_scatter_tensor(self) -> bool:
        return True

    def has_coalescing_manager(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, async_op=False, **__: _Done() if async_op else None


def _first_on_meta(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose first result is a meta tensor: what it computes from is real, and on the host."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if isinstance(result, Tensor):
            return torch.empty_like(result, device=META)
        first, *others = result
        return torch.empty_like(first, device=META), *others

    return wrapped


class MemoryByLine(Memory):
    """Memory in lines: what each storage was made for, and in which part of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.moment = "weights", ""
        self.by_line: Counter[str] = Counter()
        self.at_peak: dict[str, int] = {}
        self._line_of: dict[int, str] = {}
        """By the address of the storage."""

    def enter(self, phase: str) -> None:
        self.phase = phase

    def begin(self) -> None:
        super().begin()
        self.at_peak, self.moment = dict(self.by_line), self.phase

    def relabel(self, line: Callable[[int], str]) -> None:
        """Put each storage that is held into another line, by its address."""
        self._line_of = {address: line(address) for address in self.held}
        self.by_line.clear()
        for address, size in self.held.items():
            self.by_line[self._line_of[address]] += size

    def hold(self, address: int, size: int) -> None:
        if address not in self._line_of:
            is_whole = self.phase in ("weights", "optimizer_states", "step")
            of_file = "" if is_whole else f": {_caller() if size > 4096 else 'other'}"
            self._line_of[address] = f"{self.phase}{of_file}"
        self.by_line[self._line_of[address]] += size - self.held.get(address, 0)
        super().hold(address, size)

    def forget(self, address: int) -> None:
        if address in self.held:
            self.by_line[self._line_of.pop(address)] -= self.held[address]
        super().forget(address)


def _caller() -> str:
    """Return the line of the innermost caller that has one; autograd has no file."""
    frame: Any = sys._getframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if line := next((line for part, line in _FILES.items() if part in path), ""):
            return line
        frame = frame.f_back
    return "gradients"


@contextmanager
def _stand_ins(job: Job) -> Iterator[MemoryByLine]:
    memory, run_backward = MemoryByLine(), torch.autograd._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        with GpuKernels(memory, job.capability):  # torch takes a mode away while it handles a call
            return run_backward(*args, **kwargs)

    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    objects: list[tuple[Any, str, Any]] = [
        (real_accelerator, "ds_accelerator", GpuOfMeta()),
        (comm, "cdb", Ranks(job.ranks, job.rank)),
        (partition_parameters, "assert_ints_same_as_other_ranks", nothing),
        (partitioned_param_coordinator, "assert_ints_same_as_other_ranks", nothing),
        (importlib.import_module("torch.optim.adam"), "_device_dtype_check_for_fused", nothing),
        (torch.autograd, "_engine_run_backward", backward),
        (modeling_qwen2_5_vl, "get_vision_position_ids", _first_on_meta(modeling_qwen2_5_vl.get_vision_position_ids)),
        (modeling_qwen2_5_vl, "get_vision_window_index", _first_on_meta(modeling_qwen2_5_vl.get_vision_window_index)),
        # Meta tensors hold no tokens of images.
        *((module, "torch_compilable_check", nothing) for module in (modeling_llava, modeling_qwen2_5_vl)),
        (F, "linear", F.linear),  # ZeRO-3 replaces it and leaves it so
        (sdpa_attention, "use_gqa_in_sdpa", sdpa_attention.use_gqa_in_sdpa),  # so does the next line
    ]
    if not job.is_packed:
        objects.append((masking_utils, "find_packed_sequence_indices", nothing))
    with ExitStack() as stack:
        for owner, name, stand_in in objects:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        repeat_heads_on_old_gpus(job.capability)
        stack.enter_context(mock.patch.dict(os.environ, {"LOCAL_RANK": "0"}))
        # bitsandbytes keeps the table of its 8-bit numbers, which would stay a meta tensor in this process.
        stack.enter_context(mock.patch.dict(bitsandbytes.functional.name2qmap, clear=True))
        stack.enter_context(as_on_a_gpu())
        stack.enter_context(without_autocast(job.dtype))
        stack.enter_context(memory)
        stack.enter_context(GpuKernels(memory, job.capability))
        yield memory
