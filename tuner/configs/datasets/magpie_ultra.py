"""Magpie Ultra v0.1: 50,000 instructions by Llama 3.1 405B."""

train_dataloader = dict(dataset=dict(path="argilla/magpie-ultra-v0.1", format="alpaca"))
