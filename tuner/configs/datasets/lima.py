"""LIMA: 1,030 carefully chosen questions and answers, as LLaMA-Factory publishes them."""

train_dataloader = dict(dataset=dict(path="llamafactory/lima", format="sharegpt"))
