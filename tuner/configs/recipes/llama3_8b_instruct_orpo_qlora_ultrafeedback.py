"""ORPO with QLoRA as XTuner trains it: a shorter warm-up."""

_base_ = "llama3_8b_instruct_orpo_qlora_ultrafeedback_e5"

param_scheduler = dict(warmup_ratio=0.01)
