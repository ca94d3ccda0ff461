"""Expert parallelism (DeepSpeed's AutoEP): which models and recipes it divides, and which experts a rank has.

The plan and the merge of a DeepSpeed config use it; it computes no memory. Each rank has some experts of each layer and
the whole rest of the model; tokens travel to the experts that their router chose, and back (Lepikhin et al., GShard,
2020, arXiv:2006.16668, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tuner.errors import DsKey, Key, Option, RecipeError, TunerError
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.long_context import SHARED_BY, untested_by
from tuner.recipes.schema.objectives import OBJECTIVES
from tuner.recipes.schema.tensor_parallel import untried_beside

DIVIDED_BY = "expert_parallel.autoep_size"
DIVIDED_TYPES = frozenset(("deepseek_v2", "deepseek_v3", "mixtral", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe"))
"""model_types for which two ranks compute the same loss and gradients as one (tests/worker/test_expert_parallel.py).

DeepSpeed 0.19.8 knows one kind more, the text half of MiniMax M3, which is right too (4e-7); but no formula counts its
experts, and AutoEP refuses the model with its tower, as it is published.
"""
_GROUPED = ("k_proj", "o_proj", "q_proj", "v_proj")
_LATENT = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj", "q_proj")
_OF_LINEAR = ("in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "out_proj")
_OF_ATTENTION = frozenset((*_GROUPED, *_LATENT, *_OF_LINEAR))


def of_rank(architecture: Architecture, size: int) -> Architecture:
    """Return the architecture that counts what each of `size` ranks has, less a part of the router, which is whole."""
    return architecture.model_copy(update={"num_experts": (architecture.num_experts or 0) // size})


def refusals(config: RecipeConfig, size: int, num_ranks: int) -> Iterator[TunerError]:
    """Yield what is wrong with dividing the experts of a recipe's model over groups of `size` ranks."""
    architecture, over = config.architecture, f"expert parallelism over {size} ranks"
    num_experts = architecture.num_experts if architecture else None
    if num_ranks % size:
        problem = f"{num_ranks} rank{'s' * (num_ranks > 1)} cannot be grouped by {size}"
        yield RecipeError(problem, where=DIVIDED_BY, fix=f"Use {max(1, round(num_ranks / size)) * size} ranks.")
    if num_experts and num_experts % size:
        sizes = ", ".join(str(size) for size in range(2, num_experts + 1) if num_experts % size == 0)
        problem = f"{num_experts} experts cannot be divided by {size}"
        yield RecipeError(problem, where=DIVIDED_BY, fix=f"Set it to one of {sizes}.")
    if architecture and (problem_of_type := untested(size, architecture.model_type)):
        yield problem_of_type
    for where, problem, fix in _untried(config):
        yield RecipeError(f"{over} {problem}", where=where, fix=fix)


untested = partial(untested_by, "expert", DIVIDED_BY, DIVIDED_TYPES)
"""`untested_by` of ranks that divide experts."""


def _untried(config: RecipeConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the keys of a recipe that do not go with divided experts, or were never tried: what and the fix."""
    train_cfg, adapter, off_key = config.train_cfg, config.adapter, DsKey("expert_parallel.enabled", False)
    optimizer = config.optim_wrapper.optimizer
    if config.quantization:
        why = "is not tested with weights in 4 or 8 bits"
        yield "quantization", why, f"Use {Key('quantization', None)}, or {off_key} and {Option('deepspeed', 'zero3')}."
    if train_cfg.sequence_parallel_size > 1:
        yield SHARED_BY, "is not tested with ranks that share samples", f"Set it to 1, or use {off_key}."
    if not config.objective.facts.packs:
        supported = " and ".join(name for name, block in OBJECTIVES.items() if block.facts.packs)
        why = f"supports only {supported}, and this is {config.objective.type}"
        yield "objective", why, f"Use {off_key}; {Option('deepspeed', 'zero3')} shards the experts too."
    yield from untried_beside(config, off_key)
    if train_cfg.trainable_layers:
        fix = f"Use {Key('trainable_layers', None)}, or {off_key}."
        yield "train_cfg.trainable_layers", "is not tested with trainable_layers", fix
    names = adapter.target_modules if adapter else ()
    if isinstance(names, str) or not {name.rpartition(".")[2] for name in names} <= _OF_ATTENTION:
        why = "takes PEFT's layer around the experts for the experts, and would train without its LoRA"
        is_latent = config.architecture is not None and config.architecture.kv_lora_rank
        attention = Key("target_modules", [*(_LATENT if is_latent else _GROUPED)])
        yield "adapter.target_modules", why, f"Adapt attention alone, {attention}, or use {off_key}."
    if adapter and (adapter.use_dora or adapter.modules_to_save or adapter.changes_base or adapter.path):
        yield "adapter", "is tested with new and plain LoRA alone", f"Use plain LoRA, or {off_key}."
    if optimizer.facts.library != "torch" or optimizer.loraplus_lr_ratio:
        yield "optim_wrapper.optimizer", "is tested with optimizers of torch alone", f"Use AdamW, or {off_key}."
