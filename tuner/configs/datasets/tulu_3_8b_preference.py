"""Tulu 3 8B's preference mix; 272,898 pairs; ODC-BY."""

train_dataloader = dict(dataset=dict(path="allenai/llama-3.1-tulu-3-8b-preference-mixture", format="preference"))
