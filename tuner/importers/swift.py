"""ms-swift's command lines `swift sft|pt|rlhf`, the shell scripts that call it, and its YAML and JSON.

`--dataset` takes `id[:subset][#rows]`, several; ids are ModelScope's there unless --use_hf is true.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tuner.importers import training_arguments
from tuner.importers.document import Document
from tuner.importers.training_arguments import (
    NUM_PROC,
    attention,
    held_out,
    model,
    own_template,
    target,
    truth,
    weights_type,
)
from tuner.importers.translation import Given, Outcome, Rule, Tool, Translation
from tuner.recipes import paths
from tuner.recipes.aliases import Alias, by_word

_RLHF = {"dpo": "dpo", "orpo": "orpo", "kto": "kto", "rm": "reward"}
_DATASET = re.compile(r"(?P<path>.+?)(?::(?P<name>[^:#/]+))?(?:#(?P<rows>\d{1,15}))?", re.DOTALL)
_ADAPTERS = {"lora", "dora", "lora_llm"}


def _prepare(t: Translation) -> None:
    said = t.document.values
    kind = str(said.get("tuner_type") or said.get("train_type") or said.get("sft_type") or "lora")
    quantized = said.get("quant_bits") or truth(said.get("load_in_4bit"))
    t.method = "full" if kind == "full" else "qlora" if quantized else "dora" if truth(said.get("use_dora")) else "lora"
    command = t.document.command[1] if t.document.command[:1] == ("swift",) else "sft"
    rlhf = str(said.get("rlhf_type") or ("dpo" if command == "rlhf" else ""))
    t.objective = "pretrain" if command == "pt" else _RLHF.get(rlhf, "sft")
    if rlhf and rlhf not in _RLHF:
        t.obstacle = f"tuner does not support {rlhf}: it trains on rows"
    if str(said.get("task_type") or "causal_lm") not in ("causal_lm", "seq_cls"):
        t.obstacle = f"tuner does not train {said['task_type']}"


def method(t: Translation, given: Given) -> None:
    """Take the method."""
    word = str(given.value)
    known = word in ("full", *_ADAPTERS)
    outcome = Outcome.TAKEN if word == t.method else Outcome.TRANSLATED if known else Outcome.CHANGED
    t.note(given, outcome, f"method {t.method}", None if known else f"tuner has no {word}")


def rlhf_type(t: Translation, given: Given) -> None:
    """Take what is learned."""
    if t.obstacle:
        t.note(given, Outcome.CHANGED, "objective.type = 'sft'", t.obstacle)
    else:
        t.note(given, Outcome.TRANSLATED, f"objective {t.objective}")


def datasets(t: Translation, given: Given) -> None:
    """Take each data set, with its subset and its number of rows."""
    words = given.words(None)
    if not words:
        raise given.wrong("has no data set")
    for word in words:
        found = _DATASET.fullmatch(word)
        assert found is not None, "every text has a path"
        rows = int(found["rows"]) if found["rows"] else None
        if found["rows"] == "0":
            raise given.wrong("no rows are requested", "Use #N with N above 0.")
        made = {"path": found["path"], "name": found["name"], "split": "train", "max_rows": rows}
        (t.validation if given.key == "val_dataset" else t.datasets).append(made)
    on_hub = [word for word in words if paths.local(word.partition("#")[0].partition(":")[0]) is None]
    if on_hub and not truth(t.value("use_hf")):
        why = "ids are ModelScope's in ms-swift and the Hugging Face hub's in tuner"
        t.note(given, Outcome.CHANGED, f"data {' '.join(words)}", why)
    else:
        t.note(given, Outcome.TRANSLATED, f"data {' '.join(words)}")


def setting(*objectives: str) -> Rule:
    """Return the rule of a setting that some objectives have; its name is ours."""

    def rule(t: Translation, given: Given) -> None:
        if t.objective in objectives:
            value = given.value if given.key != "loss_type" or isinstance(given.value, list) else [given.value]
            t.set(given, f"objective.{given.key}", value)
        else:
            t.leave(given, f"is not a setting of {t.objective}")

    return rule


def adapters(t: Translation, given: Given) -> None:
    """Go on with a trained adapter."""
    if t.method == "full":
        t.leave(given, "all weights are trained: merge it into the model first (tuner export --merge)")
    else:
        t.set(given, "adapter.path", given.value[0] if isinstance(given.value, list) and given.value else given.value)


def system(t: Translation, given: Given) -> None:
    """Take the system turn."""
    text = " ".join(map(str, given.value)) if isinstance(given.value, list) else str(given.value)
    for one in (*t.datasets, *t.validation):
        one["system"] = text
    t.note(given, Outcome.TRANSLATED, "train_dataloader.dataset.system")


def _settle(t: Translation) -> None:
    """Give every data set the system turn, whichever came first."""
    if given := t.given.get("system"):
        for one in (*t.datasets, *t.validation):
            one["system"] = " ".join(map(str, given.value)) if isinstance(given.value, list) else str(given.value)


def max_length(t: Translation, given: Given) -> None:
    """Take the length of a row; unasked, ms-swift takes as much as the model does."""
    why = "in ms-swift this is the model's whole context: --set max_length=N" if given.is_default else None
    t.set(given, "train_dataloader.dataset.max_length", given.value, why, changed=given.is_default)


def accumulation(t: Translation, given: Given) -> None:
    """Take the accumulation; unasked, ms-swift divides 16 samples a step by the ranks, which are not known here."""
    why = "on N ranks ms-swift divides it: --set accumulative_counts=..." if given.is_default else None
    t.set(given, "optim_wrapper.accumulative_counts", given.value, why, changed=given.is_default)


def _defaults(document: Document) -> Mapping[str, Any]:
    said = document.values
    is_full = str(said.get("tuner_type") or said.get("train_type") or "lora") == "full"
    adapter = (
        {} if is_full else {"lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear"}
    )
    general = training_arguments.no_warmup(training_arguments.DEFAULTS, document)
    batch = str(said.get("per_device_train_batch_size") or 1)
    return {
        **general,
        **adapter,
        "learning_rate": 1e-5 if is_full else 1e-4,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": max(1, 16 // int(batch)) if batch.isdigit() and int(batch) else 1,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "logging_steps": 5,
        "gradient_checkpointing": True,
        "max_length": 2048,
        "packing": False,
    }


_MEDIA = "tuner trains text models and does not support images or sound"
_ROLLOUT = "belongs to learning from rewards (GRPO, GKD, PPO), which tuner does not support"
_SPEED = "affects only speed or memory; tuner sets it automatically"
_DATA = "tuner prepares data once and caches it"
_NOT = "tuner does not support this"
_REASONS = {
    "use_hf hub_token local_repo_path": "ids refer to the Hugging Face hub (HF_HOME, HF_TOKEN)",
    "model_type task_type problem_type num_labels init_strategy device_map max_memory max_model_len": (
        "transformers' Auto classes detect it"
    ),
    "template_backend use_chat_template agent_template response_prefix enable_thinking norm_bbox": (
        "tuner uses the model's own chat template: --set model.chat_template"
    ),
    "preserve_thinking add_non_thinking_prefix disable_ignore_empty_think stop_words": "the chat template sets it",
    "truncation_strategy padding_side padding_free max_pixels": (
        "samples that are too long are truncated or split, and counted"
    ),
    "loss_scale is_binary_loss_scale": "the loss weighs every answer equally",
    "zero_hpz_partition_size deepspeed_autotp_size tensor_parallel_*": (
        "each sample stays on one GPU; for DeepSpeed's own settings: --deepspeed my.json"
    ),
    "load_from_cache_file dataset_shuffle val_dataset_shuffle streaming interleave_prob": _DATA,
    "stopping_strategy shuffle_buffer_size download_mode columns disable_auto_column_mapping cached_*": _DATA,
    "custom_dataset_info lazy_tokenize packing_length packing_num_proc packing_strategy train_dataloader_shuffle": (
        _DATA
    ),
    "model_name model_author": "for the self-cognition data: write the names into the rows",
    "external_plugins custom_register_path model_kwargs load_args load_data_args ignore_args_error": (
        "ms-swift's own code and settings"
    ),
    "freeze_* aligner_lr vit_* image_* video_* fps* modality*": _MEDIA,
    "trainable_parameters* target_regex target_parameters lora_bias lora_dtype lorap_* lora_ga_* init_weights": (
        "adapters are PEFT's standard LoRA"
    ),
    "fourier_* boft_* vera_* adapter_* adalora_* llamapro_* reft_* galore_* use_galore lisa_* use_swift_lora": _NOT,
    "quant_method hqq_axis bnb_4bit_compute_dtype bnb_4bit_quant_storage": "4-bit weights are bitsandbytes' NF4",
    "max_new_tokens temperature top_k top_p repetition_penalty num_beams stream logprobs* top_logprobs": (
        "answering: tuner chat, tuner eval"
    ),
    "infer_backend result_path metric predict_with_generate eval_* extra_eval_args": "evaluation: tuner eval",
    "add_version create_checkpoint_symlink max_shard_size merge_lora resume_only_model use_flash_ckpt": (
        "each run has its own folder; tuner export writes the files to publish"
    ),
    "swanlab_* wandb_* strict lang verbose check_model tuner_backend ddp_* experts_impl early_stop_interval": _NOT,
    "use_logits_to_keep ds3_gather_for_generation acc_strategy enable_channel_loss enable_dft_loss mrl_dims": _SPEED,
    "optimizer callbacks metric_* rescale_image new_special_tokens rope_scaling": _NOT,
    "num_generations reward_* vllm_* sglang_* use_vllm log_completions num_iterations max_completion_length": _ROLLOUT,
    "sleep_level offload_model offload_optimizer move_model_batches async_generate teacher_* lmbda seq_kd": _ROLLOUT,
    "sft_alpha gkd_* dynamic_sample max_resample_times overlong_filter soft_* epsilon* num_ppo_epochs": _ROLLOUT,
    "whiten_rewards kl_* cliprange* vf_coef gamma lam num_mini_batches local_rollout_* num_sample_*": _ROLLOUT,
    "response_length missing_eos_penalty scale_rewards importance_* advantage_* loss_scale_* delta": _ROLLOUT,
    "generation_* steps_per_generation num_generations_eval multi_turn_* max_turns gym_env use_gym_env": _ROLLOUT,
    "context_manager cosine_* repetition_* ref_model* ref_adapters rpo_alpha cpo_alpha simpo_gamma": (
        "tuner's reference is the model before training"
    ),
    "tau entropy_* top_entropy_quantile rollout_* off_policy* sync_ref_model log_entropy use_liger_loss": _ROLLOUT,
    "center_rewards discopop_* undesirable_* desirable_*": _NOT,
    "completion_length_limit_scope enable_flattened_weight_sync min_p offload_teacher_model real_tau": _ROLLOUT,
    "use_ray ray_* device_groups": "tuner starts its processes itself: --nnodes, tuner submit",
    "rlsd_* sdar_* structured_outputs_regex": _ROLLOUT,
    "enable_npu_model_patch safe_serialization reference_free ref_adapter_name": _NOT,
    "prm_* orm_* sampler_* log_rollout_* fipo_* chord_* tau_*": _ROLLOUT,
}

TABLE: Mapping[str, Rule] = {
    **training_arguments.TABLE,
    **by_word(_REASONS),
    "router_aux_loss_coef": Alias("model.router_aux_loss_coef"),
    "model": model,
    "model_id_or_path": model,
    "model_revision": Alias("model.revision"),
    "torch_dtype": weights_type,
    "attn_impl": attention,
    "dataset_num_proc": NUM_PROC,
    "tuner_type": method,
    "train_type": method,
    "sft_type": method,
    "rlhf_type": rlhf_type,
    "quant_bits": Alias("quantization.bits"),
    "bnb_4bit_quant_type": Alias("quantization.quant_type"),
    "bnb_4bit_use_double_quant": Alias("quantization.double_quant"),
    "lora_rank": Alias("adapter.r"),
    "lora_alpha": Alias("adapter.lora_alpha"),
    "lora_dropout": Alias("adapter.lora_dropout"),
    "target_modules": target,
    "modules_to_save": Alias("adapter.modules_to_save"),
    "use_dora": Alias("adapter.use_dora"),
    "use_rslora": Alias("adapter.use_rslora"),
    "adapters": adapters,
    "dataset": datasets,
    "val_dataset": datasets,
    "split_dataset_ratio": held_out,
    "system": system,
    "template": own_template,
    "max_length": max_length,
    "gradient_accumulation_steps": accumulation,
    "packing": Alias("train_dataloader.dataset.packing"),
    "max_epochs": training_arguments.epochs,
    "sequence_parallel_size": training_arguments.SHARED_SAMPLES,
    "beta": setting("dpo", "orpo", "kto"),
    "loss_type": setting("dpo"),
    "label_smoothing": setting("dpo"),
    "ld_alpha": setting("dpo"),
    "loss_weights": setting("dpo"),
    "desirable_weight": setting("kto"),
    "undesirable_weight": setting("kto"),
    "center_rewards_coefficient": setting("reward"),
}

TOOL = Tool(
    "ms-swift",
    TABLE,
    _defaults,
    _settle,
    _prepare,
    keys="swift",
)
