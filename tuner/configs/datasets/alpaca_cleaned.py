"""Alpaca with its mistakes removed; 51,760 rows; CC BY 4.0."""

train_dataloader = dict(dataset=dict(path="yahma/alpaca-cleaned", format="alpaca"))
