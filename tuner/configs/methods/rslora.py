"""Rank-stabilized LoRA: adapters scaled by alpha / sqrt(r), so that high ranks learn."""

adapter = dict(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", use_rslora=True)
optim_wrapper = dict(optimizer=dict(lr=2e-4))
