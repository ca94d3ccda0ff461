"""Alpaca's instructions answered by GPT-4; 52,002 rows; CC BY-NC 4.0."""

train_dataloader = dict(dataset=dict(path="vicgalle/alpaca-gpt4", format="alpaca"))
