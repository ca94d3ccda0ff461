"""MiniCPM-1B on your own plain text as XTuner trains it: a step each micro-batch."""

_base_ = "minicpm_1b_full_custom_pretrain_e1"

optim_wrapper = dict(accumulative_counts=1)
