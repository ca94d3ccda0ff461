"""SlimOrca: 517,982 of OpenOrca's conversations that GPT-4 found right; MIT."""

train_dataloader = dict(dataset=dict(path="Open-Orca/SlimOrca", format="sharegpt"))
