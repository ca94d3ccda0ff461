"""qwen1_5_110b on alpaca as XTuner trains it: half the learning rate, a step each micro-batch."""

_base_ = "qwen1_5_110b_qlora_alpaca_e3"

optim_wrapper = dict(optimizer=dict(lr=1e-4), accumulative_counts=1)
