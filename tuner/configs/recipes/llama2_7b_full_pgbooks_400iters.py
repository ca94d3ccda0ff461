"""Llama-2-7B on whole books as XTuner trains it."""

_base_ = "llama2_7b_full_pgbooks_e1"

optim_wrapper = dict(accumulative_counts=8)
param_scheduler = dict(warmup_ratio=0.05)
