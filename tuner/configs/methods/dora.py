"""Weight-decomposed low-rank adapters: LoRA with a trained magnitude per output."""

adapter = dict(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", use_dora=True)
optim_wrapper = dict(optimizer=dict(lr=2e-4))
