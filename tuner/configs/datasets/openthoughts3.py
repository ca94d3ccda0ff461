"""OpenThoughts 3: 1.2 million questions with QwQ's thoughts; Apache 2.0."""

train_dataloader = dict(dataset=dict(path="open-thoughts/OpenThoughts3-1.2M", format="sharegpt"))
