"""MiniCPM3-4B on your own plain text as XTuner trains it: 1,024 tokens a sample, a step each micro-batch."""

_base_ = "minicpm3_4b_full_custom_pretrain_e1"

train_dataloader = dict(dataset=dict(max_length=1024))
optim_wrapper = dict(accumulative_counts=1)
