"""BELLE: one million instructions in Chinese; GPL 3.0."""

train_dataloader = dict(dataset=dict(path="BelleGroup/train_1M_CN", format="alpaca"))
