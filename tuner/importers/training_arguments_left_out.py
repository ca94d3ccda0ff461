"""The words of transformers' `TrainingArguments` that a recipe has no counterpart for, each with the reason."""

from __future__ import annotations

_DOES = "the command itself does it"
LAUNCH = "the launcher sets it: --nproc-per-node, --nnodes, --node-rank, --master-addr"
_MADE = "tuner does this automatically"
_OWN = "trackers read their own variables (WANDB_PROJECT, WANDB_NAME ...)"
_HUB = "tuner uploads when you ask: tuner export RUN --push OWNER/NAME"
NOT = "tuner does not support this"
_SAVES = "tuner saves resumable checkpoints, at steps"
_DATA = "tuner prepares rows once, in its own way"
_SPEED = "affects only speed or memory; tuner sets it automatically"
REASONS = {
    "output_dir overwrite_output_dir": "each run gets its own run directory: --work-dir DIR",
    "do_train do_eval do_predict local_rank resume_from_checkpoint": f"{_DOES}: tuner train, --resume",
    "ddp_timeout": "tuner ends a run without progress: train_cfg.hang_timeout",
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend": _MADE,
    "fsdp fsdp_* accelerator_config parallelism_config use_cpu no_cuda": (
        "tuner trains with DeepSpeed: --deepspeed zero3 splits the weights as FSDP does"
    ),
    "run_name logging_dir project trackio_*": _OWN,
    "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision": _HUB,
    "log_level log_level_replica log_on_each_node logging_first_step logging_nan_inf_filter disable_tqdm debug": (
        "tuner has its own logs: metrics.jsonl in the run directory, tuner report"
    ),
    "include_tokens_per_second include_num_input_tokens_seen skip_memory_metrics plot_loss": (
        "always in the run's metrics"
    ),
    "save_only_model": "a checkpoint is always resumable; for only the weights: tuner export RUN DEST",
    "save_on_each_node enable_jit_checkpoint save_safetensors ignore_data_skip save_first_step": _SAVES,
    "restore_callback_states_from_checkpoint": _SAVES,
    "data_seed full_determinism": "there is one seed: randomness.seed",
    "dataloader_drop_last dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor": _DATA,
    "dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names": _DATA,
    "train_sampling_strategy length_column_name group_by_length dispatch_batches split_batches": (
        "tuner shuffles rows by the seed, and packs them"
    ),
    "gradient_checkpointing_kwargs activation_checkpointing_kwargs": "tuner uses the non-reentrant form",
    "lr_scheduler_kwargs": "schedules have only warmup_ratio and end at 0",
    "neftune_noise_alpha optim_args optim_target_modules average_tokens_across_devices": NOT,
    "tf32 use_cache torch_compile_backend torch_compile_mode torch_compile_options": _SPEED,
    "liger_kernel_config torch_empty_cache_steps auto_find_batch_size": _SPEED,
    "eval_delay eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps": (
        "validation computes only the loss, at train_cfg.val_interval"
    ),
    "prediction_loss_only include_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval": (
        "validation computes only the loss, in the compute type"
    ),
    "metric_for_best_model greater_is_better": "the best checkpoint is the one with the lowest validation loss",
    "trust_remote_code": "tuner uses transformers' own classes; remote code needs a commit as model.revision",
    "accelerate_config num_processes num_machines machine_rank main_process_ip main_process_port": LAUNCH,
}
"""Words without a counterpart -> why."""
