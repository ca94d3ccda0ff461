"""BELLE's school mathematics in Chinese, 250,000 problems; GPL 3.0."""

train_dataloader = dict(dataset=dict(path="BelleGroup/school_math_0.25M", format="alpaca"))
