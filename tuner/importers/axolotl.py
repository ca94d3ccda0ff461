"""Axolotl's YAML, with its list of `datasets`, each of which names its own format.

Its old words for the same things are known too; an empty key says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.importers import axolotl_data, deepspeed, rules, training_arguments, words
from tuner.importers.document import Document
from tuner.importers.rules import truth
from tuner.importers.translation import Given, Rule, Tool, Translation
from tuner.recipes.aliases import by_word

_RL = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "kto": "kto"}
_FLAGGED = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "flex_attention": "flex_attention",
}
_KNOWN_ATTENTION = {"eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"}
_TRACKERS = {"use_comet": "comet_ml"}
"""Flag -> our tracker, where that is not the flag's own word."""


def _prepare(t: Translation) -> None:
    said = t.document.values
    adapter = str(said.get("adapter") or "")
    t.method = adapter if adapter in ("lora", "qlora") else "lora" if adapter else "full"
    if t.method == "lora" and (truth(said.get("load_in_4bit")) or truth(said.get("load_in_8bit"))):
        t.method = "qlora"
    elif t.method == "lora" and truth(said.get("peft_use_dora")):
        t.method = "dora"
    rl = str(said.get("rl") or "")
    t.objective = _RL.get(rl, "reward" if truth(said.get("reward_model")) else "sft")
    if rl and rl not in _RL:
        t.obstacle = f"tuner does not support {rl}: it trains on rows"
    if said.get("pretraining_dataset"):
        t.objective = "pretrain"


def rl(t: Translation, given: Given) -> None:
    """Take what is learned; IPO is a loss of DPO here."""
    rules.learned(t, given)
    if given.value == "ipo":
        t.set(given, "objective.loss_type", ["ipo"])


def of_objective(ours: str, objective: str) -> Rule:
    """Return the rule of a setting that others have too here, and by another word there."""

    def rule(t: Translation, given: Given) -> None:
        if t.objective != objective:
            t.leave(given, f"belongs to {objective}, and this is {t.objective}")
        else:
            t.set(given, f"objective.{ours}", [given.value] if ours == "loss_type" else given.value)

    return rule


def target(t: Translation, given: Given) -> None:
    """Take the layers that are adapted, a list of names or one pattern."""
    t.set(given, "adapter.target_modules", given.value if isinstance(given.value, str) else given.words())


def linear(t: Translation, given: Given) -> None:
    """Take all linear layers, unless some are named."""
    if not truth(given.value):
        t.leave(given, "the given layers are adapted, or all linear ones")
    elif t.value("lora_target_modules"):
        t.leave(given, "lora_target_modules lists them")
    else:
        t.set(given, "adapter.target_modules", "all-linear")


def flagged_attention(t: Translation, given: Given) -> None:
    """Take the old flags of attention."""
    if truth(given.value) and given.key in _FLAGGED:
        t.set(given, "model.attn_implementation", _FLAGGED[given.key])
    else:
        t.leave(given, "transformers has no such kernel" if truth(given.value) else "false has no effect")


def any_attention(t: Translation, given: Given) -> None:
    """Take the kernel where transformers has it."""
    if str(given.value) in _KNOWN_ATTENTION:
        rules.attention(t, given)
    else:
        why = f"tuner uses transformers' choice for {given.value!r}"
        t.set(given, "model.attn_implementation", None, why, changed=True)


def liger(t: Translation, given: Given) -> None:
    """Take one of Liger's kernels, all of which are one setting here."""
    if truth(given.value):
        t.set(given, "model.use_liger_kernel", True, "all of its kernels together")
    else:
        t.leave(given, "false: its kernels are one setting, which another key may enable")


def checkpointing(t: Translation, given: Given) -> None:
    """Take gradient checkpointing; where its results wait is DeepSpeed's matter here."""
    if str(given.value).lower() in ("offload", "offload_disk", "unsloth"):
        t.set(given, "train_cfg.gradient_checkpointing", True, "kept on the GPU", changed=True)
    else:
        t.set(given, "train_cfg.gradient_checkpointing", truth(given.value))


def deepcompile(t: Translation, given: Given) -> None:
    """Compile the model with DeepSpeed's passes."""
    if truth(given.value):
        t.set(given, "train_cfg.torch_compile", "deepcompile")
    else:
        t.leave(given, "it is off")


def tracker(t: Translation, given: Given) -> None:
    """Take a tracker that a flag turns on."""
    if truth(given.value):
        t.set(given, "log.trackers", [_TRACKERS.get(given.key, given.key.removeprefix("use_"))])
    else:
        t.leave(given, "false: the default without log.trackers")


def wandb_project(t: Translation, given: Given) -> None:
    """A project is what turns Weights & Biases on."""
    t.set(given, "log.trackers", ["wandb"], "the project: WANDB_PROJECT=NAME before the command")


def _defaults(document: Document) -> Mapping[str, Any]:
    said = document.values
    is_adapter = bool(said.get("adapter"))
    of_adapter = {"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0} if is_adapter else {}
    named = any(said.get(key) for key in ("lora_target_modules", "lora_target_linear"))
    return {
        **of_adapter,
        **({"lora_target_modules": ["q_proj", "v_proj"]} if is_adapter and not named else {}),
        "sequence_len": 512,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "num_epochs": 1,
        "sample_packing": False,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "lr_scheduler": "cosine",
        "gradient_checkpointing": False,
        "seed": 42,
        # Without either it warms up for 3 % of all steps, at most 100 (core/builders/base.py).
        **({"warmup_ratio": 0.03} if said.get("warmup_ratio") is None and said.get("warmup_steps") is None else {}),
    }


_WORDS = words.of("axolotl")
TABLE: Mapping[str, Rule] = {
    **{key: rule for key, rule in training_arguments.TABLE.items() if "*" not in key},
    **_WORDS.rules,
    **by_word(
        {
            "base_model": rules.model,
            "adapter": rules.method,
            "lora_model_dir": rules.adapter_path,
            "load_in_4bit load_in_8bit": rules.bits,
            "lora_target_modules": target,
            "lora_target_linear": linear,
            "rl": rl,
            "dpo_beta": of_objective("beta", "dpo"),
            "orpo_alpha": of_objective("beta", "orpo"),
            "dpo_loss_type": of_objective("loss_type", "dpo"),
            "datasets test_datasets pretraining_dataset": axolotl_data.datasets,
            "default_system_message": rules.system,
            "val_set_size": rules.held_out,
            "num_epochs": rules.epochs,
            "optimizer": rules.optimizer,
            "lr_scheduler": rules.schedule,
            "bf16 fp16 bfloat16 float16": rules.compute_type,
            "gradient_checkpointing": checkpointing,
            "activation_offloading": rules.switched("train_cfg.activation_offloading"),
            "deepcompile": deepcompile,
            "attn_implementation": any_attention,
            " ".join((*_FLAGGED, "xformers_attention", "sage_attention")): flagged_attention,
            "wandb_project": wandb_project,
            "use_wandb use_tensorboard use_mlflow use_comet use_trackio": tracker,
            "deepspeed": deepspeed.chosen,
            "liger_rms_norm liger_glu_activation liger_swiglu liger_rope liger_layer_norm": liger,
        }
    ),
}

TOOL = Tool("Axolotl", TABLE, _defaults, prepare=_prepare, others=_WORDS.others)
