"""DeepSeek-MoE with small adapters, as XTuner trains it."""

_base_ = "deepseek_moe_16b_chat_qlora_custom_sft_e1"

adapter = dict(r=16, lora_dropout=0.05)
