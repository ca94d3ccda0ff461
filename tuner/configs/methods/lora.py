"""Low-rank adapters beside every linear layer of a frozen 16-bit model."""

adapter = dict(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", use_dora=False)
optim_wrapper = dict(optimizer=dict(lr=2e-4))
