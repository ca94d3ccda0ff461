"""Infinity-Instruct's chat part, English and Chinese; 1.46 million conversations; gated; CC BY-SA 4.0."""

train_dataloader = dict(dataset=dict(path="BAAI/Infinity-Instruct", name="Gen", format="sharegpt"))
