"""Keys that older guides show and DeepSpeed 0.19.8 refuses or never read, as a table, and the step that drops them.

It judges no key that DeepSpeed still reads: that is `lint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from tuner.recipes.merging import lookup
from tuner.zero.findings import Findings
from tuner.zero.jsonfile import named
from tuner.zero.rules import is_off

# removed: an error when on, dropped aloud when off. inert: dropped aloud, whatever it holds.
Kind = Literal["removed", "inert"]


class Obsolete(NamedTuple):
    """A key of the past.

    Attributes:
        why: What became of it; completes "`key` ...".
        instead: What to do; an imperative sentence.
        off: Values beside false, null, 0, "", {} and {"enabled": false} that switch it off.
    """

    kind: Kind
    why: str
    instead: str
    off: tuple[Any, ...] = ()


_REMOVED = "was removed from DeepSpeed, which rejects the key"
_DEPRECATED = "is deprecated in DeepSpeed"
_COMMENT = ("_", "//", "#")
_NEVER = "was never read by DeepSpeed"

OBSOLETE: dict[tuple[str, ...], Obsolete] = {
    ("amp",): Obsolete("removed", _REMOVED, "Use bf16 or fp16; the recipe's optim_wrapper.dtype chooses."),
    ("compression_training",): Obsolete("removed", _REMOVED, "Quantize with the recipe's quantization instead."),
    ("curriculum_learning",): Obsolete(
        "removed", _REMOVED, "Use data_efficiency.data_sampling.curriculum_learning instead."
    ),
    ("eigenvalue",): Obsolete("removed", _REMOVED, "Nothing replaces it; remove it."),
    ("elasticity",): Obsolete("removed", _REMOVED, "Remove it: a run resumes on another number of ranks by --resume."),
    ("graph_harvesting",): Obsolete("removed", _REMOVED, "Use compile instead."),
    ("nebula",): Obsolete("removed", _REMOVED, "Remove it: checkpoints are written by the run itself."),
    ("progressive_layer_drop",): Obsolete("removed", _REMOVED, "Nothing replaces it; remove it."),
    ("quantize_training",): Obsolete("removed", _REMOVED, "Quantize with the recipe's quantization instead."),
    ("sparse_attention",): Obsolete("removed", _REMOVED, "Use the recipe's model.attn_implementation instead."),
    ("sparse_gradients",): Obsolete("removed", _REMOVED, "Remove it: embeddings built with sparse=True need no key."),
    ("zero_optimization", "mics_shard_size"): Obsolete(
        "removed", _REMOVED, "Use zero_hpz_partition_size, which shards weights within a group.", (-1,)
    ),
    ("zero_optimization", "mics_hierarchical_params_gather"): Obsolete(
        "removed", _REMOVED, "Use zero_hpz_partition_size, which shards weights within a group."
    ),
    ("zero_optimization", "zeropp_loco_param"): Obsolete(
        "removed", _REMOVED, "Remove it: zero_quantized_gradients works without it."
    ),
    ("zero_optimization", "cpu_offload"): Obsolete(
        "removed", _DEPRECATED, 'Write "offload_optimizer": {"device": "cpu"}.'
    ),
    ("zero_optimization", "cpu_offload_param"): Obsolete(
        "removed", _DEPRECATED, 'Write "offload_param": {"device": "cpu"}.'
    ),
    ("zero_optimization", "cpu_offload_use_pin_memory"): Obsolete(
        "inert", "is no longer used by DeepSpeed", "Write pin_memory inside offload_optimizer or offload_param."
    ),
    ("zero_optimization", "stage3_max_act_size"): Obsolete("inert", _NEVER, "Nothing replaces it."),
    ("activation_checkpointing", "enabled"): Obsolete(
        "inert", _NEVER, "The recipe's train_cfg.gradient_checkpointing decides."
    ),
    ("pipeline", "micro_batch_size"): Obsolete("inert", _NEVER, "The recipe's train_dataloader.batch_size decides."),
    ("seed",): Obsolete("inert", _NEVER, "The recipe's randomness.seed decides."),
    ("aio", "thread_count"): Obsolete("inert", "is no longer read by DeepSpeed", "Write intra_op_parallelism."),
    **{
        ("compile", key): Obsolete(
            "inert", "is no longer read by DeepSpeed", "The recipe's train_cfg.torch_compile decides."
        )
        for key in ("disable", "backend", "kwargs")
    },
    ("comms_config",): Obsolete("inert", _NEVER, "Use comms_logger to log communication."),
    ("monitor_config",): Obsolete("inert", _NEVER, "Use tensorboard, wandb, csv_monitor or comet."),
    ("fp32_allreduce",): Obsolete(
        "removed", "is no longer read by DeepSpeed", 'Write "communication_data_type": "fp32".'
    ),
}


def drop_comments(value: dict[str, Any], findings: Findings) -> None:
    """Take out keys that are comments, such as `_comment`, which some tools' configs hold, with one warning for all."""
    found = list(_comments(value))
    if not found:
        return
    for keys in found:
        lookup(value, keys[:-1]).pop(keys[-1], None)  # an alias of YAML is the same block in two places
    names = ", ".join(".".join(keys) for keys in found)
    what = f"{names}: DeepSpeed ignores keys that begin with an underscore or a slash; dropped as a comment"
    findings.warn(found[0], what, "A comment starts with //.")


def _comments(value: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, inner in value.items():
        if key.startswith(_COMMENT):
            yield (*prefix, key)
        elif isinstance(inner, dict):
            yield from _comments(inner, (*prefix, key))


def drop(value: dict[str, Any], findings: Findings) -> None:
    """Take obsolete keys out of `value`, each with a warning, or with a problem where one is switched on."""
    _zero_as_a_block(value, findings)
    for keys, obsolete in OBSOLETE.items():
        block = lookup(value, keys[:-1])
        if isinstance(block, dict) and keys[-1] in block:
            setting = block.pop(keys[-1])
            harmless = obsolete.kind == "inert" or is_off(setting, obsolete.off)
            report: Callable[..., None] = findings.warn if harmless else findings.problem
            dropped = "; it was dropped" if harmless else ""
            report(keys, f"{'.'.join(keys)} {obsolete.why}{dropped}", obsolete.instead)


def _zero_as_a_block(value: dict[str, Any], findings: Findings) -> None:
    """Write out the oldest form of the ZeRO block, which DeepSpeed's first guide still shows."""
    setting = value.get("zero_optimization")
    if isinstance(setting, bool):
        stage = int(setting)
        what = f"{named(('zero_optimization',), setting)} is deprecated in DeepSpeed, which reads it as stage {stage}"
        findings.warn(("zero_optimization",), what, f'Write "zero_optimization": {{"stage": {stage}}}.')
        value["zero_optimization"] = {"stage": stage}
