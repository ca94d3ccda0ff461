"""Llama-2-70B in 8 bits with small adapters beside its feed-forward layers alone, as XTuner trains it."""

_base_ = "llama2_70b_lora_open_platypus_e1"

quantization = dict(bits=8)
adapter = dict(r=16, lora_dropout=0.05, target_modules=("gate_proj", "down_proj", "up_proj"))
optim_wrapper = dict(optimizer=dict(lr=3e-4))
