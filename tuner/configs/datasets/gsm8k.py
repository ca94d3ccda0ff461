"""GSM8K: 7,473 school problems with their steps; MIT."""

train_dataloader = dict(dataset=dict(path="openai/gsm8k", name="main", format="alpaca"))
