"""A mix of eight preference sets; 44,245 pairs; Apache 2.0."""

train_dataloader = dict(dataset=dict(path="mlabonne/orpo-dpo-mix-40k", format="preference"))
