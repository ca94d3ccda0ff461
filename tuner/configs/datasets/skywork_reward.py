"""Skywork's pairs for reward models, v0.2; 77,016 pairs."""

train_dataloader = dict(dataset=dict(path="Skywork/Skywork-Reward-Preference-80K-v0.2", format="preference"))
