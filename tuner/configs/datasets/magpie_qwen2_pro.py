"""Magpie: 300,000 instructions that Qwen 2 72B made up and answered."""

train_dataloader = dict(dataset=dict(path="Magpie-Align/Magpie-Qwen2-Pro-300K-Filtered", format="sharegpt"))
