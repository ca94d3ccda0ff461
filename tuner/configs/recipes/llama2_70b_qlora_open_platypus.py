"""Llama-2-70B with adapters beside its feed-forward layers alone, as XTuner trains it."""

_base_ = "llama2_70b_qlora_open_platypus_e1"

adapter = dict(target_modules=("gate_proj", "down_proj", "up_proj"))
optim_wrapper = dict(optimizer=dict(lr=3e-4))
