"""Low-rank adapters beside every linear layer of a frozen 16-bit model."""

adapter = dict(r=64, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear", use_dora=False)
optim_wrapper = dict(optimizer=dict(lr=2e-4))
