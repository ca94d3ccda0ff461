"""Alpaca's instructions in Chinese, answered by GPT-4, as LLaMA-Factory publishes them."""

train_dataloader = dict(dataset=dict(path="llamafactory/alpaca_gpt4_zh", format="alpaca"))
