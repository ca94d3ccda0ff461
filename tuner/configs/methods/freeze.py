"""The last two decoder layers alone are trained; the rest is frozen."""

train_cfg = dict(trainable_layers=2)
