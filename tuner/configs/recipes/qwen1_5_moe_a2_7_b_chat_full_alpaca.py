"""Qwen1.5-MoE-A2.7B-Chat on alpaca as XTuner trains it: 32k tokens a sample, a step each micro-batch."""

_base_ = "qwen1_5_moe_a2_7_b_chat_full_alpaca_e3"

train_dataloader = dict(dataset=dict(max_length=32768))
optim_wrapper = dict(accumulative_counts=1)
