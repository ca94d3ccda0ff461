"""Your own conversations in rows of 32,768 tokens, under XTuner's name: name the file with --data."""

# XTuner trains every model on it at these numbers.
train_dataloader = dict(dataset=dict(max_length=32768))
optim_wrapper = dict(optimizer=dict(lr=4e-5, betas=(0.9, 0.95), weight_decay=0.01), accumulative_counts=1)
param_scheduler = dict(warmup_ratio=0.025)
