"""Argilla's small mix of three preference sets; 6,750 pairs; MIT."""

train_dataloader = dict(dataset=dict(path="argilla/dpo-mix-7k", format="preference"))
