"""Axolotl's YAML, with its list of `datasets`, each of which names its own format.

Its old words for the same things are known too; an empty key says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.importers import axolotl_data, deepspeed, training_arguments
from tuner.importers.axolotl_left_out import REASONS
from tuner.importers.document import Document
from tuner.importers.training_arguments import (
    NUM_PROC,
    SHARED_SAMPLES,
    attention,
    compute_type,
    held_out,
    liger,
    model,
    truth,
)
from tuner.importers.translation import Given, Outcome, Rule, Tool, Translation
from tuner.recipes.aliases import Alias, by_word

_RL = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "kto": "kto"}
_FLAGGED = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "flex_attention": "flex_attention",
}
_LIGER = ("liger_rms_norm", "liger_glu_activation", "liger_swiglu", "liger_rope", "liger_layer_norm")
_KNOWN_ATTENTION = {"eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"}


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
    """Take what is learned."""
    if t.obstacle:
        t.note(given, Outcome.CHANGED, "objective.type = 'sft'", t.obstacle)
    else:
        t.note(given, Outcome.TAKEN if given.value == t.objective else Outcome.TRANSLATED, f"objective {t.objective}")
        if given.value == "ipo":
            t.set(given, "objective.loss_type", ["ipo"])


def adapter(t: Translation, given: Given) -> None:
    """Take the method."""
    same = given.value == t.method
    changed = given.value not in ("lora", "qlora", "dora")
    outcome = Outcome.CHANGED if changed else Outcome.TAKEN if same else Outcome.TRANSLATED
    t.note(given, outcome, f"method {t.method}", f"tuner has no adapter {given.value!r}" if changed else None)


def bits(t: Translation, given: Given) -> None:
    """Take 4 or 8 bits where there is an adapter."""
    if truth(given.value) and t.method == "qlora":
        t.set(given, "quantization.bits", 4 if given.key == "load_in_4bit" else 8)
    else:
        t.leave(
            given, "tuner always does this" if not truth(given.value) else "weights are only quantized with an adapter"
        )


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
        attention(t, given)
    else:
        why = f"tuner uses transformers' choice for {given.value!r}"
        t.set(given, "model.attn_implementation", None, why, changed=True)


def setting(ours: str, *objectives: str) -> Rule:
    """Return the rule of a setting that some objectives have."""

    def rule(t: Translation, given: Given) -> None:
        if t.objective in objectives:
            value = given.value
            if ours == "loss_type" and not isinstance(value, list):
                value = [value]
            t.set(given, f"objective.{ours}", value)
        else:
            t.leave(given, f"belongs to {' and '.join(objectives)}, and this is {t.objective}")

    return rule


def checkpointing(t: Translation, given: Given) -> None:
    """Take gradient checkpointing; where its results wait is DeepSpeed's matter here."""
    word = str(given.value).lower()
    if word in ("offload", "offload_disk", "unsloth"):
        t.set(given, "train_cfg.gradient_checkpointing", True, "kept on the GPU", changed=True)
    else:
        t.set(given, "train_cfg.gradient_checkpointing", truth(given.value))


def deepcompile(t: Translation, given: Given) -> None:
    """Compile the model with DeepSpeed's passes."""
    if truth(given.value):
        t.set(given, "train_cfg.torch_compile", "deepcompile")
    else:
        t.leave(given, "it is off")


def use_tracker(name: str) -> Rule:
    """Return the rule of use_wandb and its kind."""

    def rule(t: Translation, given: Given) -> None:
        if truth(given.value):
            t.set(given, "log.trackers", [name])
        else:
            t.leave(given, "false: the default without log.trackers")

    return rule


def wandb_project(t: Translation, given: Given) -> None:
    """A project is what turns Weights & Biases on."""
    t.set(given, "log.trackers", ["wandb"], "the project: WANDB_PROJECT=NAME before the command")


def lora_model_dir(t: Translation, given: Given) -> None:
    """Go on with a trained adapter."""
    if t.method == "full":
        t.leave(given, "all weights are trained: merge it into the model first (tuner export --merge)")
    else:
        t.set(given, "adapter.path", str(given.value))


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


TABLE: Mapping[str, Rule] = {
    **{key: rule for key, rule in training_arguments.TABLE.items() if "*" not in key},
    **by_word(REASONS),
    "base_model": model,
    "revision_of_model": Alias("model.revision"),
    "adapter": adapter,
    "lora_model_dir": lora_model_dir,
    "load_in_4bit": bits,
    "load_in_8bit": bits,
    "lora_r": Alias("adapter.r"),
    "lora_alpha": Alias("adapter.lora_alpha"),
    "lora_dropout": Alias("adapter.lora_dropout"),
    "lora_target_modules": target,
    "lora_target_linear": linear,
    "lora_modules_to_save": Alias("adapter.modules_to_save"),
    "peft_use_dora": Alias("adapter.use_dora"),
    "peft_use_rslora": Alias("adapter.use_rslora"),
    "rl": rl,
    "rl_beta": setting("beta", "dpo", "orpo", "kto"),
    "dpo_beta": setting("beta", "dpo"),
    "orpo_alpha": setting("beta", "orpo"),
    "dpo_loss_type": setting("loss_type", "dpo"),
    "dpo_loss_weights": setting("loss_weights", "dpo"),
    "dpo_label_smoothing": setting("label_smoothing", "dpo"),
    "dpo_use_weighting": setting("use_weighting", "dpo"),
    "precompute_ref_log_probs": setting("precompute_ref_log_probs", "dpo", "kto"),
    "kto_desirable_weight": setting("desirable_weight", "kto"),
    "kto_undesirable_weight": setting("undesirable_weight", "kto"),
    "center_rewards_coefficient": setting("center_rewards_coefficient", "reward"),
    "datasets": axolotl_data.datasets,
    "test_datasets": axolotl_data.datasets,
    "pretraining_dataset": axolotl_data.datasets,
    "default_system_message": axolotl_data.system,
    "val_set_size": held_out,
    "sequence_len": Alias("train_dataloader.dataset.max_length"),
    "sample_packing": Alias("train_dataloader.dataset.packing"),
    "micro_batch_size": Alias("train_dataloader.batch_size"),
    "num_epochs": training_arguments.epochs,
    "optimizer": training_arguments.optimizer,
    "lr_scheduler": training_arguments.schedule,
    "bf16": compute_type,
    "fp16": compute_type,
    "bfloat16": compute_type,
    "float16": compute_type,
    "adam_eps": Alias("optim_wrapper.optimizer.eps"),
    "eta_min": "the schedules end at 0",
    "warmup_steps": training_arguments.warmup_steps,
    **dict.fromkeys(("sequence_parallel_degree", "context_parallel_size"), SHARED_SAMPLES),
    "gradient_checkpointing": checkpointing,
    "activation_offloading": training_arguments.switched("train_cfg.activation_offloading"),
    "tiled_mlp": Alias("train_cfg.tiled_mlp"),
    "torch_compile": training_arguments.switched("train_cfg.torch_compile"),
    "deepcompile": deepcompile,
    "loraplus_lr_ratio": Alias("optim_wrapper.optimizer.loraplus_lr_ratio"),
    "peft_init_lora_weights": Alias("adapter.init_lora_weights"),
    "attn_implementation": any_attention,
    **dict.fromkeys((*_FLAGGED, "xformers_attention", "sage_attention"), flagged_attention),
    "early_stopping_patience": Alias("train_cfg.early_stopping_patience"),
    "wandb_project": wandb_project,
    "use_wandb": use_tracker("wandb"),
    "use_tensorboard": use_tracker("tensorboard"),
    "use_mlflow": use_tracker("mlflow"),
    "use_comet": use_tracker("comet_ml"),
    "use_trackio": use_tracker("trackio"),
    "deepspeed": deepspeed.chosen,
    "dataset_processes": NUM_PROC,
    "dataset_num_proc": NUM_PROC,
    **dict.fromkeys(_LIGER, liger),
}

TOOL = Tool(
    "Axolotl",
    TABLE,
    _defaults,
    axolotl_data.settle,
    _prepare,
    keys="axolotl",
)
