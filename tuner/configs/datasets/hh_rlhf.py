"""Anthropic's helpful and harmless conversations; 160,800 pairs; MIT."""

train_dataloader = dict(dataset=dict(path="Anthropic/hh-rlhf", format="preference"))
