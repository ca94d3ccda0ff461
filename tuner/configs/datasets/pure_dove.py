"""Pure-Dove: 3,856 filtered conversations with GPT-4; Apache 2.0."""

train_dataloader = dict(dataset=dict(path="LDJnr/Pure-Dove", format="rounds"))
