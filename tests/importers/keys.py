"""The keys that each tool's own example configs hold, most frequent first; a value that is of the right kind."""

from __future__ import annotations

from typing import Any

import yaml  # type: ignore[import-untyped]

OF_TOOL: dict[str, dict[str, Any]] = {
    "llamafactory": yaml.safe_load("""{
model_name_or_path: Qwen/Qwen3-8B, template: qwen3, trust_remote_code: true, cutoff_len: 1024,
preprocessing_num_workers: 16, stage: sft, output_dir: saves/x, finetuning_type: lora, dataset: mine.jsonl, do_train:
true, per_device_train_batch_size: 1, logging_steps: 10, lr_scheduler_type: cosine, gradient_accumulation_steps: 8,
overwrite_output_dir: true, learning_rate: 1e-4, save_steps: 500, report_to: none, plot_loss: true, warmup_ratio: 0.1,
bf16: true, dataloader_num_workers: 4, ddp_timeout: 180000000, max_samples: 1000, num_train_epochs: 3.0,
save_only_model: false, overwrite_cache: true, lora_target: all, lora_rank: 8, resume_from_checkpoint: null,
image_max_pixels: 262144, video_max_pixels: 16384, deepspeed: examples/deepspeed/ds_z3_config.json, flash_attn: fa2,
max_steps: 500, use_v1_kernels: true, use_kt: true, adapter_name_or_path: saves/adapter, infer_backend: huggingface,
export_size: 5, export_dir: saves/merged, export_device: cpu, export_legacy_format: false,
disable_gradient_checkpointing: false, quantization_bit: 4, kt_cpu_activation: retain, kt_config: {kt_num_threads:
96}, packing: false, seed: 1234, pure_bf16: true, quantization_method: bnb
}"""),
    "axolotl": yaml.safe_load("""{
base_model: Qwen/Qwen3-8B, sequence_len: 1024, micro_batch_size: 1, output_dir: ./outputs/out, learning_rate: 2e-5,
optimizer: adamw_bnb_8bit, bf16: auto, datasets: [{path: mine.jsonl, type: chat_template, split: train,
field_messages: messages}], lr_scheduler: cosine, gradient_accumulation_steps: 4, logging_steps: 1, num_epochs: 1,
tf32: true, sample_packing: true, warmup_ratio: 0.1, saves_per_epoch: 1, val_set_size: 0.05, attn_implementation:
flash_attention_2, gradient_checkpointing: true, weight_decay: 0.0, wandb_project: null, evals_per_epoch: 4, adapter:
qlora, lora_alpha: 16, lora_r: 32, dataset_prepared_path: last_run_prepared, lora_dropout: 0.05, special_tokens:
{pad_token: <|endoftext|>}, resume_from_checkpoint: null, load_in_4bit: true, lora_model_dir: null, load_in_8bit:
false, lora_target_modules: [q_proj], plugins: [axolotl.integrations.liger.LigerPlugin], lora_target_linear: true,
model_type: AutoModelForCausalLM, chat_template: llama3, tokenizer_type: AutoTokenizer, gradient_checkpointing_kwargs:
{use_reentrant: false}, fsdp_config: {offload_params: true}, eval_sample_packing: false, pad_to_sequence_len: false,
strict: false, trust_remote_code: true, fp16: false, liger_rms_norm: true, liger_glu_activation: true,
remove_unused_columns: false, eot_tokens: [<|eot|>], liger_layer_norm: true
}"""),
    "trl": yaml.safe_load("""{
torch_dtype: bfloat16, model_name_or_path: Qwen/Qwen3-8B, num_train_epochs: 1, bf16: true,
per_device_train_batch_size: 2, save_strategy: steps, logging_steps: 1, seed: 42, lr_scheduler_type:
cosine_with_min_lr, gradient_accumulation_steps: 4, output_dir: data/out, learning_rate: 2.0e-05,
gradient_checkpointing: true, warmup_ratio: 0.1, do_eval: true, gradient_checkpointing_kwargs: {use_reentrant: false},
log_level: info, push_to_hub: true, hub_model_id: mine, eval_strategy: steps, dataset_num_proc: 12, report_to:
[tensorboard, wandb], attn_implementation: flash_attention_2, model_revision: main, per_device_eval_batch_size: 8,
save_total_limit: 1, logging_strategy: steps, hub_strategy: every_save, overwrite_output_dir: true, max_steps: -1,
dataset_mixture: {datasets: [{id: a/b, config: default, split: train, weight: 1.0}], seed: 0}, chat_template: '{% for
message in messages %}{% endfor %}', save_steps: 100, max_length: 1024, optim: adamw_torch, eval_steps: 100,
max_seq_length: 2048, lr_scheduler_kwargs: {min_lr_rate: 0.1}, remove_unused_columns: true, max_grad_norm: 0.2,
use_liger_kernel: true
}"""),
    "torchtune": yaml.safe_load("""{
device: cuda, checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /tmp/Qwen3-8B,
model_type: QWEN3, output_dir: '${output_dir}', checkpoint_files: [a.safetensors], recipe_checkpoint: null},
tokenizer: {_component_: torchtune.models.qwen3.qwen3_tokenizer, path: /tmp/x, max_seq_len: null}, dtype: bf16, seed:
null, output_dir: /tmp/out, model: {_component_: torchtune.models.qwen3.lora_qwen3_8b, lora_rank: 8,
lora_attn_modules: [q_proj, v_proj, output_proj], apply_lora_to_mlp: true, lora_alpha: 16, lora_dropout: 0.0},
batch_size: 2, log_level: INFO, resume_from_checkpoint: false, metric_logger: {_component_:
torchtune.training.metric_logging.DiskLogger, log_dir: '${output_dir}/logs'}, log_every_n_steps: 1,
log_peak_memory_stats: true, loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}, optimizer:
{_component_: torch.optim.AdamW, lr: 3e-4, fused: true}, compile: false, enable_activation_checkpointing: true,
dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset, packed: false}, shuffle: true, epochs: 1,
gradient_accumulation_steps: 8, max_steps_per_epoch: null, enable_activation_offloading: false, clip_grad_norm: null,
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 100}
}"""),
    "roll": yaml.safe_load("""{
defaults: [../config/deepspeed_zero3@_here_], hydra: {run: {dir: .}, output_subdir: null}, exp_name: x, seed: 42,
logging_dir: ./output/logs, output_dir: ./output, system_envs: {A: '1'}, save_steps: 100, logging_steps: 1,
resume_from_checkpoint: false, checkpoint_config: {type: file_system}, max_steps: 500, eval_steps: 10,
num_gpus_per_node: 8, pretrain: Qwen/Qwen3-8B, rollout_batch_size: 64, adv_estimator: reinforce, whiten_advantages:
true, track_with: tensorboard, tracker_kwargs: {log_dir: x}, sequence_length: 1024, ppo_epochs: 1, reward_clip: 10,
advantage_clip: 2.0, reward_pretrain: Qwen/Qwen3-8B, max_grad_norm: 1.0, prompt_length: 2048, response_length: 4096,
num_return_sequences_in_group: 8, value_clip: 0.5, dual_clip_loss: true, add_token_level_kl: false, validation:
{data_args: {file_name: x}}, rewards: {math: {worker_cls: x}}, max_len_mask: true, difficulty_mask: true,
difficulty_low_threshold: 0.1, actor_infer: {device_mapping: 'list(range(0,8))'}, reference: {model_args: {dtype:
bf16}}, actor_train: {strategy_args: {strategy_name: deepspeed_train, strategy_config: '${deepspeed_zero3}'},
device_mapping: 'list(range(0,8))', training_args: {learning_rate: 1.0e-06, per_device_train_batch_size: 1,
gradient_accumulation_steps: 32, warmup_steps: 20, weight_decay: 0, num_train_epochs: 1, lr_scheduler_type: constant},
data_args: {template: qwen2_5, preprocessing_num_workers: 16, file_name: [mine.jsonl], dataset_dir: data, messages:
messages, interleave_probs: '1.0', domain_interleave_probs: {math_rule: 0.4}}, model_args: {dtype: bf16, model_type:
null, disable_gradient_checkpointing: false, attn_implementation: fa2, ulysses_size: 2}, infer_batch_size: 1}
}"""),
    "ms-swift": yaml.safe_load("""{
model: Qwen/Qwen3-8B, dataset: mine.jsonl#1000, gradient_accumulation_steps: '16', tuner_type: lora, learning_rate:
1e-4, per_device_train_batch_size: '1', logging_steps: '5', save_steps: '100', save_total_limit: '2',
num_train_epochs: '1', torch_dtype: bfloat16, eval_steps: '100', dataloader_num_workers: '4', warmup_ratio: '0.05',
max_length: '2048', output_dir: output, per_device_eval_batch_size: '1', load_from_cache_file: 'true',
split_dataset_ratio: '0.01', deepspeed: zero2, dataset_num_proc: '4', lora_alpha: '32', lora_rank: '8',
target_modules: all-linear, attn_impl: flash_attn, model_name: swift-robot, model_author: swift, system: You are
kind., save_only_model: 'true', use_vllm: 'true', vllm_mode: colocate, num_generations: '8', temperature: '1.0',
freeze_vit: 'true', freeze_aligner: 'true', log_completions: 'true', reward_funcs: accuracy, packing: 'true',
report_to: tensorboard, padding_free: 'true', sleep_level: '1', gradient_checkpointing: 'true', eval_strategy: steps,
task_type: causal_lm, beta: '0.1', loss_type: grpo, use_liger_kernel: 'true', num_iterations: '1', external_plugins:
plugin.py, dataloader_drop_last: 'true', offload_model: 'true', offload_optimizer: 'true', top_p: '0.9'
}"""),
}
"""A config by the value of --from."""
