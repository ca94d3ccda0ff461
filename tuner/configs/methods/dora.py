"""Weight-decomposed low-rank adapters: LoRA with a trained magnitude per output."""

adapter = dict(r=64, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear", use_dora=True)
optim_wrapper = dict(optimizer=dict(lr=2e-4))
