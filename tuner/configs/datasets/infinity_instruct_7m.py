"""Infinity-Instruct's 7.4 million instructions, English and Chinese; gated; CC BY-SA 4.0."""

train_dataloader = dict(dataset=dict(path="BAAI/Infinity-Instruct", name="7M", format="sharegpt"))
