"""Magpie: 300,000 instructions that Llama 3 8B made up and answered."""

train_dataloader = dict(dataset=dict(path="Magpie-Align/Magpie-Air-300K-Filtered", format="sharegpt"))
