"""Axolotl's YAML, with its list of `datasets`, each of which names its own format.

Its old words for the same things are known too; an empty key says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.importers import axolotl_data, deepspeed, training_arguments
from tuner.importers.document import Document
from tuner.importers.training_arguments import attention, compute_type, model, truth
from tuner.importers.translation import Given, Outcome, Rule, Tool, Translation
from tuner.recipes.aliases import Alias, by_word

_RL = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "kto": "kto"}
_FLAGGED = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "flex_attention": "flex_attention",
}
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
        t.obstacle = f"tuner has no {rl}: it learns from rows"
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
        t.leave(given, "always so" if not truth(given.value) else "without an adapter nothing is quantized")


def target(t: Translation, given: Given) -> None:
    """Take the layers that are adapted, a list of names or one pattern."""
    words = given.value if isinstance(given.value, list) else str(given.value)
    t.set(given, "adapter.target_modules", words)


def linear(t: Translation, given: Given) -> None:
    """Take all linear layers, unless some are named."""
    if not truth(given.value):
        t.leave(given, "the layers that are named are adapted, or all linear ones")
    elif t.value("lora_target_modules"):
        t.leave(given, "lora_target_modules names them")
    else:
        t.set(given, "adapter.target_modules", "all-linear")


def flagged_attention(t: Translation, given: Given) -> None:
    """Take the old flags of attention."""
    if truth(given.value) and given.key in _FLAGGED:
        t.set(given, "model.attn_implementation", _FLAGGED[given.key])
    else:
        t.leave(given, "transformers has no such kernel" if truth(given.value) else "false says nothing")


def any_attention(t: Translation, given: Given) -> None:
    """Take the kernel where transformers has it."""
    if str(given.value) in _KNOWN_ATTENTION:
        attention(t, given)
    else:
        why = f"tuner takes transformers' choice for {given.value!r}"
        t.set(given, "model.attn_implementation", None, why, changed=True)


def val_set_size(t: Translation, given: Given) -> None:
    """Take a part of the rows for validation."""
    part = float(given.value)
    if 0 < part < 1:
        t.set(given, "train_dataloader.dataset.val_split", part)
    elif part == 0:
        t.leave(given, "nothing is held out: always so without val_split")
    else:
        t.leave(given, "a number of rows: tuner holds out a part of them, --val-split 0.05")


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


def use_tracker(name: str) -> Rule:
    """Return the rule of use_wandb and its kind."""

    def rule(t: Translation, given: Given) -> None:
        if truth(given.value):
            t.set(given, "log.trackers", [name])
        else:
            t.leave(given, "false: always so without log.trackers")

    return rule


def wandb_project(t: Translation, given: Given) -> None:
    """A project is what turns Weights & Biases on."""
    t.set(given, "log.trackers", ["wandb"], "the project: WANDB_PROJECT=NAME before the command")


def lora_model_dir(t: Translation, given: Given) -> None:
    """Go on with a trained adapter."""
    if t.method == "full":
        t.leave(given, "every weight is trained: merge it into the model first (tuner export --merge)")
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
        "logging_steps": 500,
        "seed": 42,
        **({} if said.get("warmup_ratio") or said.get("warmup_steps") else {"warmup_ratio": 0.0}),
    }


_TOKENS = "the tokenizer is the model's: change its files first"
_MEDIA = "tuner trains text models: it has nothing for images or sound"
_SPEED = "a matter of speed or memory alone, which tuner settles by itself"
_NOT = "tuner does not do that"
_PARALLEL = "tuner trains with DeepSpeed, each sample on one GPU"
_OWN = "trackers read their own variables (WANDB_PROJECT, WANDB_NAME ...)"
_REASONS = {
    "model_type tokenizer_type base_model_config cls_model_config is_*_derived_model type_of_model": (
        "transformers' Auto classes find it"
    ),
    "tokenizer_config tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common special_tokens.*": _TOKENS,
    "special_tokens tokens tokens.* added_tokens_overrides added_tokens_overrides.* eot_tokens": _TOKENS,
    "resize_token_embeddings_to_32x mean_resizing_embeddings shrink_embeddings embeddings_skip_upcast": _TOKENS,
    "fix_untrained_tokens tokenizer_save_jinja_files reinit_weights": _TOKENS,
    "processor_type processor_kwargs processor_kwargs.* image_size image_resize_algorithm role_boundaries": _MEDIA,
    "freeze_mm_modules is_multimodal image_base_dir video_* audio_*": _MEDIA,
    "chat_template chat_template_jinja chat_template_kwargs chat_template_kwargs.*": (
        "the chat template is the model's own, or its part's of the catalog: --set model.chat_template"
    ),
    "chat_template_* overrides_of_model_config overrides_of_model_config.* overrides_of_model_kwargs": _NOT,
    "overrides_of_model_kwargs.* model_quantization_config* model_config.* use_kernels use_onebitllms": _NOT,
    "dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory dataset_shard_*": (
        "data is prepared once and kept"
    ),
    "shuffle_merged_datasets shuffle_before_merging_datasets skip_prepare_dataset push_dataset_to_hub": (
        "data is prepared once and kept"
    ),
    "num_dataset_shards_to_save preprocess_iterable is_preprocess streaming streaming_* group_by_length": (
        "data is prepared once and kept"
    ),
    "dataset_exact_deduplication curriculum_sampling excess_length_strategy min_sample_len max_prompt_len": (
        "rows are taken as they are; those too long are cut or split, and counted"
    ),
    "eval_sample_packing pad_to_sequence_len pad_to_multiple_of sample_packing_* multipack_real_batches": (
        "packing is one for training and validation, best fit first"
    ),
    "batch_flattening eval_sequence_len pretrain_multipack_* pretraining_sample_concatenation use_pose pose_*": (
        "packing is one for training and validation, best fit first"
    ),
    "train_on_inputs roles_to_train train_on_eos": "the loss is taken on the assistant's turns alone",
    "plugins": "tuner has no plugins; what Liger and cut cross-entropy save, train_cfg.loss = 'chunked' does",
    "liger_* cut_cross_entropy* unsloth_* lora_*_kernel flash_attn_* flash_optimum torch_compile*": _SPEED,
    "tiled_mlp* experts_implementation quantize_moe_experts chunked_cross_entropy* fused_attn_kernel": _SPEED,
    "large_head_attention sdpa_varlen gemma4_hybrid_attn_impl flex_attn_compile_kwargs* scaling_softmax*": _SPEED,
    "activation_offloading layer_offloading* selective_checkpointing* low_cpu_mem_usage lora_on_cpu": _SPEED,
    "device device_map max_memory gpu_memory_limit world_size ddp ddp_* experimental_*": (
        "the launcher decides it: --nproc-per-node, --nnodes"
    ),
    "deepcompile bfloat16_* fp8* fp32_norms fp32_norm_classes float32 gc_steps gc_collect_steps": _SPEED,
    "fsdp fsdp.* fsdp_config.* fsdp_config fsdp_version fsdp_*": (
        "tuner trains with DeepSpeed: --deepspeed zero3 splits the weights as FSDP does"
    ),
    "sequence_parallel_degree context_parallel_size tensor_parallel_size dp_shard_size dp_replicate_size": _PARALLEL,
    "heads_k_stride ring_attn_func expert_parallel_size ep_* use_ray ray_* resources_per_worker*": _PARALLEL,
    "wandb_* mlflow_* hf_mlflow_log_artifacts comet_* gradio_* trackio_* swanlab_* otel_* use_otel_metrics": _OWN,
    "hf_use_auth_token revision_of_model_* hub_*": "the hub's own variables decide it (HF_HOME, HF_TOKEN)",
    "auto_resume_from_checkpoints dynamic_checkpoint* strict": "tuner train --resume auto; keys are always checked",
    "saves_per_epoch evals_per_epoch": (
        "steps decide: checkpoint.interval, train_cfg.val_interval; an epoch's end always counts"
    ),
    "eval_table_size eval_max_new_tokens do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_*": (
        "about evaluation: tuner eval"
    ),
    "generate_samples num_generation_samples generation_* loss_watchdog_*": "answers after training: log.num_samples",
    "include_tkps profiler_steps profiler_steps_start total_* sample_packing_eff_est axolotl_config_path": (
        "the run's metrics have it"
    ),
    "gptq bnb_config_kwargs* loftq* peft peft.* peft_layers* peft_layer_replication peft_init_lora_weights": (
        "adapters are PEFT's plain LoRA, 4-bit weights double-quantized NF4"
    ),
    "peft_trainable_token_indices* peft_ensure_weight_tying peft_autocast_adapter_dtype lora_rank_pattern*": (
        "adapters are PEFT's plain LoRA"
    ),
    "lora_alpha_pattern* lora_fan_in_fan_out lora_target_parameters qlora_sharded_model_loading loraplus_*": (
        "adapters are PEFT's plain LoRA"
    ),
    "relora* jagged_restart_* lisa_* unfrozen_parameters embedding_lr embedding_lr_scale lr_groups*": _NOT,
    "lr_quadratic_warmup cosine_min_lr_ratio cosine_constant_lr_ratio lr_div_factor lr_scheduler_kwargs*": (
        "the schedules have no settings but warmup_ratio, and end at 0"
    ),
    "adam_epsilon2 adam_beta3 dion_* qgalore_* torchdistx_path batch_size eval_batch_size optim_args*": _NOT,
    "noisy_embedding_alpha neftune_noise_alpha simpo_gamma cpo_alpha rpo_alpha dpo_use_liger_kernel": _NOT,
    "dpo_padding_free dpo_use_logits_to_keep dpo_generate_during_eval dpo_norm_loss use_eaft eaft_*": _NOT,
    "trl trl.* vllm vllm.* ebft ebft.* qat qat.* quantization quantization.* grpo* kd_* process_reward_model": (
        "belongs to learning from rewards, to distillation or to quantized training, which tuner has not"
    ),
    "num_labels reward_model trainer_cls adaptive_* mora* diffusion* llmcompressor* llama4_linearized_experts": _NOT,
    "accelerator_config* torch_empty_cache_steps sample_* nemo* s2_attention moe_kernel* use_scattermoe*": _SPEED,
    "use_sonicmoe scattermoe* sonicmoe* expert_*": _SPEED,
    "loss_type spectrum_* dataset_* test_datasets_* merge_method merge_lora router_* mtp_* opd_* spd* protrain*": _NOT,
    "protrain.* reward_* xai_* use_dsv4_kernels dsv4_* nvfp4_* test_value": _NOT,
    "gptq_* base_model_ignore_patterns full_finetune": "old words for what Axolotl does by itself now",
    "use_swanlab swanlab_*": "a tracker: log.trackers=swanlab, which reads its own variables",
    "max_packed_sequence_len": "the old sample_packing: packed rows are as long as sequence_len",
    "torch_dtype": "bf16 or fp16 decides the compute type",
}

TABLE: Mapping[str, Rule] = {
    **{key: rule for key, rule in training_arguments.TABLE.items() if "*" not in key},
    **by_word(_REASONS),
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
    "val_set_size": val_set_size,
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
    "gradient_checkpointing": checkpointing,
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
}

TOOL = Tool(
    "Axolotl",
    TABLE,
    frozenset({"base_model", "sequence_len", "micro_batch_size", "val_set_size", "num_epochs", "sample_packing"}),
    _defaults,
    axolotl_data.settle,
    _prepare,
)
