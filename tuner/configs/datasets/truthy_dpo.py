"""Truthful answers against plausible ones; 1,016 pairs; CC BY 4.0."""

train_dataloader = dict(dataset=dict(path="jondurbin/truthy-dpo-v0.1", format="preference"))
