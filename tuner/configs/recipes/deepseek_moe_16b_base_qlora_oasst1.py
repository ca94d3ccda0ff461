"""DeepSeek-MoE with small adapters, as XTuner trains it."""

_base_ = "deepseek_moe_16b_base_qlora_oasst1_e3"

adapter = dict(r=16, lora_dropout=0.05)
