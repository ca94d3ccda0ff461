"""Kahneman-Tversky optimization on single answers marked good or bad."""

objective = dict(type="kto", beta=0.1)
# An answer is set against the others of its micro-batch, so that must hold two or more.
train_dataloader = dict(batch_size=2)
optim_wrapper = dict(optimizer=dict(lr=5e-7), accumulative_counts=8)
