"""Magpie: 300,000 instructions that Llama 3 70B made up and answered."""

train_dataloader = dict(dataset=dict(path="Magpie-Align/Magpie-Pro-300K-Filtered", format="sharegpt"))
