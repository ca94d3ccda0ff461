"""Axolotl's words that have no counterpart here, each with the reason."""

from __future__ import annotations

_TOKENS = "tuner uses the model's tokenizer: change its files first"
_MEDIA = "tuner trains text models and does not support images or sound"
_SPEED = "affects only speed or memory; tuner sets it automatically"
_NOT = "tuner does not support this"
_PARALLEL = "DeepSpeed's ZeRO splits the model, and train_cfg.sequence_parallel_size the samples"
_OWN = "trackers read their own variables (WANDB_PROJECT, WANDB_NAME ...)"
REASONS = {
    "model_type tokenizer_type base_model_config cls_model_config is_*_derived_model type_of_model": (
        "transformers' Auto classes detect it"
    ),
    "tokenizer_config tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common special_tokens.*": _TOKENS,
    "special_tokens tokens tokens.* added_tokens_overrides added_tokens_overrides.* eot_tokens": _TOKENS,
    "resize_token_embeddings_to_32x mean_resizing_embeddings shrink_embeddings embeddings_skip_upcast": _TOKENS,
    "fix_untrained_tokens tokenizer_save_jinja_files reinit_weights": _TOKENS,
    "processor_type processor_kwargs processor_kwargs.* image_size image_resize_algorithm role_boundaries": _MEDIA,
    "freeze_mm_modules is_multimodal image_base_dir video_* audio_*": _MEDIA,
    "chat_template chat_template_jinja chat_template_kwargs chat_template_kwargs.*": (
        "tuner uses the model's own chat template, or the catalog's for it: --set model.chat_template"
    ),
    "chat_template_* overrides_of_model_config overrides_of_model_config.* overrides_of_model_kwargs": _NOT,
    "overrides_of_model_kwargs.* model_quantization_config* model_config.* use_kernels use_onebitllms": _NOT,
    "dataset_prepared_path dataset_keep_in_memory dataset_shard_*": ("tuner prepares data once and caches it"),
    "shuffle_merged_datasets shuffle_before_merging_datasets skip_prepare_dataset push_dataset_to_hub": (
        "tuner prepares data once and caches it"
    ),
    "num_dataset_shards_to_save preprocess_iterable is_preprocess streaming streaming_* group_by_length": (
        "tuner prepares data once and caches it"
    ),
    "dataset_exact_deduplication curriculum_sampling excess_length_strategy min_sample_len max_prompt_len": (
        "rows are used unchanged; samples that are too long are truncated or split, and counted"
    ),
    "eval_sample_packing pad_to_sequence_len pad_to_multiple_of sample_packing_* multipack_real_batches": (
        "training and validation use the same packing, best fit first"
    ),
    "batch_flattening eval_sequence_len pretrain_multipack_* pretraining_sample_concatenation use_pose pose_*": (
        "training and validation use the same packing, best fit first"
    ),
    "train_on_inputs roles_to_train train_on_eos": "the loss covers only the assistant's turns",
    "plugins": "tuner has no plugins; what Liger and cut cross-entropy save, train_cfg.loss = 'chunked' does",
    "liger_* cut_cross_entropy* unsloth_* lora_*_kernel flash_attn_* flash_optimum torch_compile_*": _SPEED,
    "tiled_mlp_* experts_implementation quantize_moe_experts chunked_cross_entropy* fused_attn_kernel": _SPEED,
    "large_head_attention sdpa_varlen gemma4_hybrid_attn_impl flex_attn_compile_kwargs* scaling_softmax*": _SPEED,
    "layer_offloading* selective_checkpointing* low_cpu_mem_usage lora_on_cpu": _SPEED,
    "device device_map max_memory gpu_memory_limit world_size ddp ddp_* experimental_*": (
        "the launcher sets it: --nproc-per-node, --nnodes"
    ),
    "bfloat16_* fp8* fp32_norms fp32_norm_classes float32 gc_steps gc_collect_steps": _SPEED,
    "fsdp fsdp.* fsdp_config.* fsdp_config fsdp_version fsdp_*": (
        "tuner trains with DeepSpeed: --deepspeed zero3 splits the weights as FSDP does"
    ),
    "tensor_parallel_size dp_shard_size dp_replicate_size": _PARALLEL,
    "heads_k_stride ring_attn_func expert_parallel_size ep_* use_ray ray_* resources_per_worker*": _PARALLEL,
    "wandb_* mlflow_* hf_mlflow_log_artifacts comet_* gradio_* trackio_* swanlab_* otel_* use_otel_metrics": _OWN,
    "hf_use_auth_token revision_of_model_* hub_*": "the hub's own variables set it (HF_HOME, HF_TOKEN)",
    "auto_resume_from_checkpoints dynamic_checkpoint* strict": "tuner train --resume auto; keys are always checked",
    "saves_per_epoch evals_per_epoch": (
        "intervals are in steps: checkpoint.interval, train_cfg.val_interval; also at the end of each epoch"
    ),
    "eval_table_* eval_max_new_tokens do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_*": (
        "evaluation: tuner eval"
    ),
    "generate_samples num_generation_samples generation_* loss_watchdog_*": "answers after training: log.num_samples",
    "include_tkps profiler_steps profiler_steps_start total_* sample_packing_eff_est axolotl_config_path": (
        "the run's metrics have it"
    ),
    "gptq bnb_config_kwargs* loftq* peft peft.* peft_layers* peft_layer_replication": (
        "adapters are PEFT's standard LoRA, 4-bit weights double-quantized NF4"
    ),
    "peft_trainable_token_indices* peft_ensure_weight_tying peft_autocast_adapter_dtype lora_rank_pattern*": (
        "adapters are PEFT's standard LoRA"
    ),
    "lora_alpha_pattern* lora_fan_in_fan_out lora_target_parameters qlora_sharded_* loraplus_lr_embedding": (
        "adapters are PEFT's standard LoRA"
    ),
    "relora* jagged_restart_* lisa_* unfrozen_parameters embedding_lr embedding_lr_scale lr_groups*": _NOT,
    "lr_quadratic_warmup cosine_min_lr_ratio cosine_constant_lr_ratio lr_div_factor lr_scheduler_kwargs*": (
        "schedules have only warmup_ratio and end at 0"
    ),
    "adam_epsilon2 adam_beta3 dion_* qgalore_* torchdistx_path batch_size eval_batch_size optim_args*": _NOT,
    "noisy_embedding_alpha neftune_noise_alpha simpo_gamma cpo_alpha rpo_alpha dpo_use_liger_kernel": _NOT,
    "dpo_padding_free dpo_use_logits_to_keep dpo_generate_during_eval dpo_norm_loss use_eaft eaft_*": _NOT,
    "trl trl.* vllm vllm.* ebft ebft.* qat qat.* quantization quantization.* grpo* kd_* process_reward_model": (
        "belongs to learning from rewards, to distillation or to quantized training, which tuner does not support"
    ),
    "num_labels reward_model trainer_cls adaptive_* mora* diffusion* llmcompressor* llama4_linearized_experts": _NOT,
    "accelerator_config* torch_empty_cache_steps sample_* nemo* s2_attention moe_kernel* use_scattermoe*": _SPEED,
    "use_sonicmoe scattermoe* sonicmoe* expert_* dense_mixer moe_bnb_fast moe_dequant_* moe_grouped_backend": _SPEED,
    "loss_type spectrum_* dataset_* test_datasets_* merge_method merge_lora router_* mtp_* opd_* spd* protrain*": _NOT,
    "rope_scaling use_glm_dsa_kernels model_kwargs": _NOT,
    "use_dsv4_kernels dsv4_* nvfp4_* grokfast_* hatchery hatchery.* lm_eval_* gemma4_* nonexpert_quantization": _NOT,
    "gptq_* base_model_ignore_patterns full_finetune": "old names for what Axolotl now does automatically",
    "use_swanlab swanlab_*": "a tracker: log.trackers=swanlab, which reads its own variables",
    "max_packed_sequence_len": "the old sample_packing; packed rows have sequence_len tokens",
    "torch_dtype": "bf16 or fp16 sets the compute type",
}
