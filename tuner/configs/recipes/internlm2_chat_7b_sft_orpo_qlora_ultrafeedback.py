"""ORPO with QLoRA as XTuner trains it: a shorter warm-up."""

_base_ = "internlm2_chat_7b_sft_orpo_qlora_ultrafeedback_e5"

param_scheduler = dict(warmup_ratio=0.01)
