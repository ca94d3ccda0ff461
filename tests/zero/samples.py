"""The sample configs of DeepSpeed's documentation, by keys and values: its guides, and the reference of the JSON.

They are inputs; what tuner says of each is in `test_samples`.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

_CPU: Config = {"device": "cpu", "pin_memory": True}
_ADAM: Config = {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
_WARMUP: Config = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}}
_BATCH: Config = {"train_batch_size": 16, "gradient_accumulation_steps": 1}
_NVME: Config = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True}


def zero(**keys: Any) -> Config:
    return {"zero_optimization": keys}


SAMPLES: dict[str, Config] = {
    "getting started": {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
        "fp16": {"enabled": True},
        "zero_optimization": True,
    },
    "optimizer and scheduler": _BATCH | {"optimizer": _ADAM, "scheduler": _WARMUP, "steps_per_print": 10},
    "torch's Adam": {"optimizer": {"type": "Adam", "params": {**_ADAM["params"], "torch_adam": True}}},
    "Muon": {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9, "adam_lr": 0.001}}} | zero(stage=2),
    "LRRangeTest": {
        "scheduler": {
            "type": "LRRangeTest",
            "params": {
                "lr_range_test_min_lr": 0.001,
                "lr_range_test_step_size": 200,
                "lr_range_test_step_rate": 5,
                "lr_range_test_staircase": False,
            },
        }
    },
    "OneCycle": {
        "scheduler": {
            "type": "OneCycle",
            "params": {
                "cycle_first_step_size": 1000,
                "cycle_first_stair_count": 500,
                "cycle_second_step_size": 1000,
                "cycle_second_stair_count": 500,
                "decay_step_size": 1000,
                "cycle_min_lr": 0.0001,
                "cycle_max_lr": 0.0010,
                "decay_lr_rate": 0.001,
                "cycle_min_mom": 0.85,
                "cycle_max_mom": 0.99,
                "decay_mom_rate": 0.0,
            },
        }
    },
    "fp16": {
        "fp16": {
            "enabled": True,
            "auto_cast": False,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "consecutive_hysteresis": False,
            "min_loss_scale": 1,
        }
    },
    "bf16": {"bf16": {"enabled": True}},
    "bf16 states": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    | zero(stage=2),
    "torch_autocast": {
        "torch_autocast": {
            "enabled": False,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": ["torch.nn.Linear", "torch.nn.Conv2d"],
        }
    },
    "gradients and communication": {
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "communication_data_type": "fp32",
        "sparse_gradients": False,
        "fp32_allreduce": False,
        "disable_allgather": False,
    },
    "zero 1": zero(stage=1, reduce_bucket_size=5e8),
    "zero 2": zero(
        stage=2,
        contiguous_gradients=True,
        overlap_comm=True,
        reduce_scatter=True,
        reduce_bucket_size=5e8,
        allgather_bucket_size=5e8,
    ),
    "zero 3": zero(
        stage=3,
        contiguous_gradients=True,
        stage3_max_live_parameters=1e9,
        stage3_max_reuse_distance=1e9,
        stage3_prefetch_bucket_size=1e7,
        stage3_param_persistence_threshold=1e5,
        reduce_bucket_size=1e7,
        sub_group_size=1e9,
        offload_optimizer={"device": "cpu"},
        offload_param={"device": "cpu"},
    ),
    "zero, every key of the reference": zero(
        stage=3,
        allgather_partitions=True,
        allgather_bucket_size=5e8,
        overlap_comm=False,
        reduce_scatter=True,
        reduce_bucket_size=5e8,
        contiguous_gradients=True,
        stage3_max_live_parameters=1e9,
        stage3_max_reuse_distance=1e9,
        stage3_prefetch_bucket_size=5e8,
        stage3_param_persistence_threshold=1e6,
        sub_group_size=1e12,
        elastic_checkpoint=False,
        stage3_gather_16bit_weights_on_model_save=False,
        ignore_unused_parameters=True,
        round_robin_gradients=False,
        zero_hpz_partition_size=1,
        zero_quantized_weights=False,
        zero_quantized_gradients=False,
        log_trace_cache_warnings=False,
    ),
    "zero-infinity on nvme": zero(
        stage=3,
        offload_optimizer=_NVME | {"buffer_count": 4, "fast_init": False, "pipeline_read": True},
        offload_param=_NVME | {"buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
    )
    | {"aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": False}},
    "asynchronous input and output": {
        "aio": {
            "block_size": 1048576,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
            "use_gds": False,
        }
    },
    "zero-offload of the first guide": zero(
        stage=2, cpu_offload=False, contiguous_gradients=True, overlap_comm=True, offload_optimizer=_CPU
    ),
    "zero++": zero(
        stage=3,
        reduce_bucket_size=10000000,
        reduce_scatter=True,
        zero_quantized_weights=True,
        zero_hpz_partition_size=16,
        zero_quantized_gradients=True,
        contiguous_gradients=True,
        overlap_comm=True,
    ),
    "zenflow": zero(
        stage=2,
        offload_optimizer=_CPU,
        zenflow={
            "topk_ratio": 0.05,
            "select_strategy": "auto",
            "select_interval": "auto",
            "update_interval": 4,
            "full_warm_up_rounds": 0,
            "overlap_step": True,
        },
    ),
    "zenflow by steps": zero(
        stage=2,
        offload_optimizer=_CPU,
        zenflow={"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 16, "update_interval": 4},
    ),
    "superoffload": zero(
        stage=3, offload_optimizer=_CPU | {"ratio": 0.9, "super_offload": True, "cpuadam_cores_perc": 0.9}
    ),
    "automatic tensor parallelism": {
        "tensor_parallel": {"autotp_size": 4},
        "zero_optimization": {"stage": 1, "gather_16bit_weights_on_model_save": True},
        "bf16": {"enabled": True},
    },
    "tensor parallelism by patterns": {
        "tensor_parallel": {
            "autotp_size": 4,
            "partition_config": {
                "use_default_specs": False,
                "layer_specs": [{"patterns": [r".*\.o_proj\.weight$"], "partition_type": "row"}],
            },
        }
    },
    "expert parallelism without a size": {"expert_parallel": {"enabled": True}},
    "automatic expert parallelism": {"expert_parallel": {"enabled": True, "autoep_size": 4}} | zero(stage=2),
    "autocast to fp16": {"torch_autocast": {"enabled": True, "dtype": "float16"}} | zero(stage=1),
    "accumulation by the caller": {"managed_gradient_accumulation": False} | zero(stage=2),
    "asynchronous checkpoints": {"datastates_ckpt": {"host_cache_size": 16}},
    "sequence parallelism": {"sequence_parallel_size": 2} | zero(stage=3),
    "activation checkpointing": {
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "number_checkpoints": None,
            "synchronize_checkpoint_boundary": False,
            "profile": False,
        }
    },
    "activation checkpointing, partitioned": {
        "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True, "number_checkpoints": 4}
    },
    "flops profiler": {
        "flops_profiler": {
            "enabled": True,
            "profile_step": 1,
            "module_depth": -1,
            "top_modules": 1,
            "detailed": True,
            "output_file": None,
        }
    },
    "monitors": {
        "tensorboard": {"enabled": True, "output_path": "output/ds_logs/", "job_name": "train_internlm2"},
        "wandb": {"enabled": True, "group": "my_group", "team": "my_team", "project": "my_project"},
        "comet": {"enabled": True, "project": "my_project", "samples_log_interval": 100, "online": True},
        "csv_monitor": {"enabled": True, "output_path": "output/ds_logs/", "job_name": "train_internlm2"},
    },
    "communication log": {
        "comms_logger": {
            "enabled": True,
            "verbose": False,
            "prof_all": True,
            "debug": False,
            "prof_ops": ["all_reduce", "all_gather"],
        }
    },
    "logging": {"steps_per_print": 10, "wall_clock_breakdown": False, "dump_state": False, "memory_breakdown": False},
    "throughput timer": {"timers": {"throughput": {"enabled": True, "synchronized": True}}},
    "checkpoints": {
        "checkpoint": {
            "tag_validation": "Warn",
            "load_universal": False,
            "use_node_local_storage": False,
            "parallel_write": {"pipeline_stage": False},
        }
    },
    "data types": {"data_types": {"grad_accum_dtype": "fp32"}} | zero(stage=2),
    "data efficiency": {
        "data_efficiency": {
            "enabled": True,
            "seed": 1234,
            "data_sampling": {
                "enabled": True,
                "num_epochs": 1000,
                "num_workers": 0,
                "curriculum_learning": {
                    "enabled": True,
                    "data_cluster_path": "clusters",
                    "curriculum_metrics": {
                        "seqlen": {
                            "index_to_sample_path": "index_to_sample",
                            "index_to_metric_path": "index_to_metric",
                            "difficulty_type": "percentile",
                            "clustering_type": "single_cluster",
                            "min_difficulty": 1,
                            "max_difficulty": 100,
                            "schedule_type": "fixed_root",
                            "schedule_config": {
                                "total_curriculum_step": 110000,
                                "difficulty_step": 1,
                                "root_degree": 2,
                            },
                        }
                    },
                },
            },
        }
    },
    "autotuning": {
        "autotuning": {
            "enabled": True,
            "results_dir": "autotuning_results",
            "exps_dir": "autotuning_exps",
            "overwrite": True,
            "metric": "throughput",
            "start_profile_step": 3,
            "end_profile_step": 5,
            "fast": True,
            "max_train_batch_size": None,
            "num_tuning_micro_batch_sizes": 3,
            "tuner_type": "model_based",
            "tuner_early_stopping": 5,
            "tuner_num_trials": 50,
        }
    },
    "compilation": {"compile": {"deepcompile": True, "offload_activation": False, "double_buffer": True}}
    | zero(stage=3),
    "hybrid engine": {
        "hybrid_engine": {
            "enabled": True,
            "max_out_tokens": 512,
            "inference_tp_size": 1,
            "release_inference_cache": False,
            "pin_parameters": True,
            "tp_gather_partition_size": 8,
        }
    },
    "cifar": {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": _ADAM,
        "scheduler": _WARMUP,
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": False},
        "fp16": {
            "enabled": True,
            "fp16_master_weights_and_grads": False,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 15,
        },
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 0,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "cpu_offload": False,
        },
    },
    "features that are gone, switched off": {
        "amp": {"enabled": False, "opt_level": "O1"},
        "elasticity": {"enabled": False, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4]},
        "curriculum_learning": {"enabled": False, "curriculum_type": "seqlen"},
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}},
        "eigenvalue": {"enabled": False},
        "progressive_layer_drop": {"enabled": False, "theta": 0.5, "gamma": 0.001},
        "quantize_training": {"enabled": False},
        "nebula": {"enabled": False},
        "sparse_attention": False,
    },
}
