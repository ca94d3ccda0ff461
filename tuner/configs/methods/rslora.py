"""Rank-stabilized LoRA: adapters scaled by alpha / sqrt(r), so that high ranks learn."""

adapter = dict(r=64, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear", use_rslora=True)
optim_wrapper = dict(optimizer=dict(lr=2e-4))
