"""StarCoder with small adapters on 20,000 rows, as XTuner trains it."""

_base_ = "starcoder_qlora_stack_exchange_e1"

adapter = dict(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=("c_proj", "c_attn"))
train_dataloader = dict(dataset=dict(max_rows=20000))
optim_wrapper = dict(optimizer=dict(lr=1e-4, weight_decay=0.05))
