"""Low-rank adapters on a frozen base with weights stored in 4 bits (NF4, double quantization)."""

quantization = dict(bits=4, quant_type="nf4", double_quant=True, experts=True)
adapter = dict(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", use_dora=False)
optim_wrapper = dict(optimizer=dict(lr=2e-4))
