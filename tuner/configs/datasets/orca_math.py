"""Orca-Math: 200,035 word problems; MIT."""

train_dataloader = dict(dataset=dict(path="microsoft/orca-math-word-problems-200k", format="alpaca"))
