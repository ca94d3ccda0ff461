"""OpenThoughts: 113,957 questions with DeepSeek-R1's thoughts; Apache 2.0."""

train_dataloader = dict(dataset=dict(path="open-thoughts/OpenThoughts-114k", format="sharegpt"))
