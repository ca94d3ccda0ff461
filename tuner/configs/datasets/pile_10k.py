"""The first 10,000 rows of the Pile; plain text."""

train_dataloader = dict(dataset=dict(path="NeelNanda/pile-10k", format="text"))
