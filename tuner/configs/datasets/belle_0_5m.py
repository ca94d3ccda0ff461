"""BELLE: half a million instructions in Chinese; GPL 3.0."""

train_dataloader = dict(dataset=dict(path="BelleGroup/train_0.5M_CN", format="alpaca"))
