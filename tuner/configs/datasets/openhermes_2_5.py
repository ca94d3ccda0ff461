"""OpenHermes 2.5: 1,001,551 conversations, mostly by GPT-4."""

train_dataloader = dict(dataset=dict(path="teknium/OpenHermes-2.5", format="sharegpt"))
