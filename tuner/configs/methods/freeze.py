"""Train only the last two decoder layers; the rest is frozen."""

train_cfg = dict(trainable_layers=2)
