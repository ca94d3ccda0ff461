"""qwen1_5_110b_chat on alpaca as XTuner trains it: half the learning rate, a step each micro-batch."""

_base_ = "qwen1_5_110b_chat_full_alpaca_e3"

optim_wrapper = dict(optimizer=dict(lr=1e-5), accumulative_counts=1)
