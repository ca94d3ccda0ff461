"""Mistral-7B with QLoRA, whatever its name in XTuner says, on your own data: 32k tokens a sample."""

_base_ = "mistral_7b_qlora_custom_sft_e1"

train_dataloader = dict(dataset=dict(max_length=32768))
