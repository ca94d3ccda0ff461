"""The helpful half of hh-rlhf as lists of turns, as TRL publishes it; 43,835 pairs."""

train_dataloader = dict(dataset=dict(path="trl-lib/hh-rlhf-helpful-base", format="preference"))
