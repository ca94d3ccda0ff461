"""NuminaMath-CoT: 859,494 competition problems with steps; Apache 2.0."""

train_dataloader = dict(dataset=dict(path="AI-MO/NuminaMath-CoT", format="messages"))
