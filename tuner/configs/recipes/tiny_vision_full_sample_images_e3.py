"""From noise to answers about pictures in three epochs on a CPU: many small, large steps."""

_base_ = "tiny_vision_full_sample_images_e3"

train_dataloader = dict(batch_size=4)
optim_wrapper = dict(optimizer=dict(lr=1e-3), accumulative_counts=1)
param_scheduler = dict(warmup_ratio=0.05)
train_cfg = dict(gradient_checkpointing=False)
