"""BELLE: two million instructions in Chinese; GPL 3.0."""

train_dataloader = dict(dataset=dict(path="BelleGroup/train_2M_CN", format="alpaca"))
