"""Tulu 3 70B's preference mix; 337,186 pairs; ODC-BY."""

train_dataloader = dict(dataset=dict(path="allenai/llama-3.1-tulu-3-70b-preference-mixture", format="preference"))
