"""Alpaca in Spanish; 51,942 rows; CC BY 4.0."""

train_dataloader = dict(dataset=dict(path="bertin-project/alpaca-spanish", format="alpaca"))
