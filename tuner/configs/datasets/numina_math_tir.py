"""NuminaMath-TIR: 72,441 problems solved with Python; Apache 2.0."""

train_dataloader = dict(dataset=dict(path="AI-MO/NuminaMath-TIR", format="messages"))
