"""Tensor parallelism (DeepSpeed's AutoTP): which models and recipes it splits, and which part of a layer a rank has.

The plan and the rank use it; it computes no memory. Shoeybi et al., Megatron-LM, 2019 (arXiv:1909.08053), section 3:
the first matrices of attention and MLP are split by columns, the last by rows, and ranks add up what the last give.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tuner.errors import Key, Option, RecipeError, TunerError
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.long_context import SHARED_BY, untested_by
from tuner.recipes.schema.objectives import OBJECTIVES

SPLIT_BY = "train_cfg.autotp_size"
LIGER = "model.use_liger_kernel"
NO_LIGER = "is not tested with Liger's kernels, which need a GPU"
"""The same for ranks that divide experts: 'auto' takes none there."""
SPLIT_TYPES = frozenset(
    (
        *("arcee", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma3_text", "gpt_neox", "granite", "internlm"),
        *("internlm2", "internlm3", "llama", "ministral", "ministral3", "mistral", "nemotron", "olmo", "phi", "qwen2"),
        *("qwen3", "smollm3", "starcoder2"),
    )
)
"""model_types for which two ranks compute the same loss and gradients as one (tests/worker/test_tensor_parallel.py).

Left out are models that have no plan of transformers, or one with a kind of split that DeepSpeed 0.19.8 does not know:
experts, latent attention, the fused layers of phi3 and glm4, the norms over all heads of olmo2. apertus trains numbers
inside of its MLP, of which each rank would get another gradient.
"""


def heads_of_fullest(architecture: Architecture, size: int) -> tuple[int, int]:
    """Return the query heads and key-value heads of the first of `size` ranks, which has the most.

    DeepSpeed 0.19.8 splits by key-value heads (module_inject/tp_shard.py, `get_shard_size`): with fewer of them than
    ranks, the last ranks have no attention.
    """
    keys = -(-architecture.num_key_value_heads // size)
    return architecture.num_attention_heads // architecture.num_key_value_heads * keys, keys


def of_fullest_rank(recipe: RecipeConfig, architecture: Architecture) -> Architecture:
    """Return the architecture that counts what the fullest of the ranks that split the layers has: the first one.

    Embeddings, norms and head are whole on each rank.
    """
    size = recipe.train_cfg.autotp_size
    return of_rank(architecture, size) if size > 1 else architecture


def of_rank(architecture: Architecture, size: int) -> Architecture:
    """Return the architecture that counts what the first of `size` ranks has."""
    query, key = heads_of_fullest(architecture, size)
    part = {"num_attention_heads": query, "num_key_value_heads": key, "head_dim": architecture.head_dim}
    return architecture.model_copy(update={**part, "intermediate_size": -(-architecture.intermediate_size // size)})


def uneven_heads(config: RecipeConfig) -> str | None:
    """Return a warning if ranks that split the layers get different numbers of heads."""
    size, architecture = config.train_cfg.autotp_size, config.architecture
    if architecture is None or size == 1 or architecture.num_key_value_heads % size == 0:
        return None
    max_heads, all_heads = heads_of_fullest(architecture, size)[0], architecture.num_attention_heads
    keys = architecture.num_key_value_heads
    heads = f"{keys} key-value head{'s' * (keys > 1)}"
    return (
        f"the model's {heads} cannot be split evenly over {size} ranks ({SPLIT_BY}): the first of them computes "
        f"{max_heads} of the {all_heads} heads, and the others wait for it."
    )


def refuse_across_nodes(config: RecipeConfig, ranks_of_node: int, num_nodes: int) -> None:
    """Refuse ranks on several nodes that would split a layer: they send its hidden states in each layer.

    Raises:
        RecipeError: a group of them would be on two nodes.
    """
    size = config.train_cfg.autotp_size
    if num_nodes > 1 and ranks_of_node % size:
        problem = f"nodes of {ranks_of_node} rank{'s' * (ranks_of_node > 1)} cannot be grouped by {size}"
        problem += ": a layer would be split between two nodes"
        sizes = ", ".join(str(size) for size in range(1, ranks_of_node + 1) if ranks_of_node % size == 0)
        raise RecipeError(problem, where=SPLIT_BY, fix=f"Set it to one of {sizes}.")


def refusals(config: RecipeConfig, num_ranks: int) -> Iterator[TunerError]:
    """Yield what is wrong with splitting the layers of a recipe over its ranks; nothing if they are not split."""
    size, architecture = config.train_cfg.autotp_size, config.architecture
    if size == 1:
        return
    over = f"tensor parallelism over {size} ranks"
    if num_ranks % size:
        sizes = ", ".join(str(size) for size in range(1, num_ranks + 1) if num_ranks % size == 0)
        near = max(1, round(num_ranks / size)) * size
        fix = f"Use {near} ranks, or set it to one of {sizes}."
        problem = f"{num_ranks} rank{'s' * (num_ranks > 1)} cannot be grouped by {size}"
        yield RecipeError(problem, where=SPLIT_BY, fix=fix)
    if architecture and (problem_of_type := untested(size, architecture.model_type)):
        yield problem_of_type
    for where, problem, fix in _untried(config):
        yield RecipeError(f"{over} {problem}", where=where, fix=fix)


untested = partial(untested_by, "tensor", SPLIT_BY, SPLIT_TYPES)
"""`untested_by` of ranks that split layers."""


def _untried(config: RecipeConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the keys of a recipe that do not go with split layers, or were never tried with them: what and the fix."""
    train_cfg, adapter, off_key = config.train_cfg, config.adapter, Key(SPLIT_BY, 1)
    optimizer = config.optim_wrapper.optimizer
    if config.quantization:
        zero3 = Option("deepspeed", "zero3")
        why = "cannot split weights in 4 or 8 bits: they are stored as one column of bytes, which DeepSpeed would cut"
        yield "quantization", why, f"Use {Key('quantization', None)} (LoRA), or {off_key} and {zero3}."
    if train_cfg.sequence_parallel_size > 1:
        yield SHARED_BY, "is not tested with ranks that share samples", f"Set one of the two to 1 ({off_key})."
    if not config.objective.facts.packs:  # its loss compares whole samples, or asks a second model
        supported = " and ".join(name for name, block in OBJECTIVES.items() if block.facts.packs)
        why = f"supports only {supported}, and this is {config.objective.type}"
        yield SPLIT_BY, why, f"Set it to 1; {Option('deepspeed', 'zero3')} shards the weights too."
    yield from untried_beside(config, off_key)
    if adapter and adapter.lora_dropout:
        why = "does not go with lora_dropout: each rank would drop other inputs of the same samples"
        yield "adapter.lora_dropout", why, f"Use {Key('lora_dropout', 0.0)}, or {off_key}."
    if adapter and (adapter.use_dora or adapter.modules_to_save or adapter.changes_base):
        why = "is tested with plain LoRA alone, without DoRA, modules_to_save and PiSSA or OLoRA"
        yield "adapter", why, f"Use plain LoRA, or {off_key}."
    if getattr(config.objective, "neftune_noise_alpha", None):
        key = "objective.neftune_noise_alpha"
        yield key, "replaces the embeddings, to which NEFTune adds noise", f"Use {Key(key, None)}, or {off_key}."
    if optimizer.facts.sees_matrices:
        why = f"does not go with {optimizer.type}, which looks at whole matrices"
        yield "optim_wrapper.optimizer.type", why, f"Use {Key('optimizer.type', 'AdamW')}, or {off_key}."
    if optimizer.loraplus_lr_ratio or optimizer.projector_lr:
        yield "optim_wrapper.optimizer", "is not tested with learning rates for single weights", f"Use {off_key}."


def untried_beside(config: RecipeConfig, off_key: str) -> Iterator[tuple[str, str, str]]:
    """Yield as `_untried` what goes neither with split layers nor with divided experts; `off_key` leaves them whole."""
    if config.reads_images:
        yield "model.images", "is not tested with images", f"Use {Key('model.images', False)}, or {off_key}."
    if config.model.use_liger_kernel is True:
        yield LIGER, NO_LIGER, f"Use {Key('use_liger_kernel', False)}, or {off_key}."
    for key in ("torch_compile", "tiled_mlp", "activation_offloading"):
        if getattr(config.train_cfg, key):
            yield f"train_cfg.{key}", f"is not tested with {key}", f"Use {Key(key, False)}, or {off_key}."
    if config.log.generate:
        why = "does not go with log.generate: each rank would answer prompts of its own"
        yield "log.generate", why, f"Use {Key('log.generate', 0)}, or {off_key}."
