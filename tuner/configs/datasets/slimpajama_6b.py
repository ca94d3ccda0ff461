"""A sample of SlimPajama, six billion tokens; plain text."""

train_dataloader = dict(dataset=dict(path="DKYoon/SlimPajama-6B", format="text"))
