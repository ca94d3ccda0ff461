"""SlimOrca without near duplicates; 363,491 conversations; MIT."""

train_dataloader = dict(dataset=dict(path="Open-Orca/SlimOrca-Dedup", format="sharegpt"))
