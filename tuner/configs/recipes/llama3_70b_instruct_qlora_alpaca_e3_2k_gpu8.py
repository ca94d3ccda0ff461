"""Llama-3-70B-Instruct on alpaca on 8 GPUs as XTuner trains it."""

_base_ = "llama3_70b_instruct_qlora_alpaca_e3"

optim_wrapper = dict(optimizer=dict(lr=1e-4), accumulative_counts=2)
