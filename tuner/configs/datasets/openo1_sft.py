"""OpenO1: 77,685 answers with thoughts; Apache 2.0."""

train_dataloader = dict(dataset=dict(path="O1-OPEN/OpenO1-SFT", format="alpaca"))
