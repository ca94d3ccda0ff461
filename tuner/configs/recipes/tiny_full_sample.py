"""From noise to right answers in three epochs on a CPU: many small, large steps."""

_base_ = "tiny_full_sample_e3"

train_dataloader = dict(batch_size=2)
optim_wrapper = dict(optimizer=dict(lr=3e-3, betas=(0.9, 0.99)), accumulative_counts=1)
param_scheduler = dict(warmup_ratio=0.05)
train_cfg = dict(gradient_checkpointing=False)
