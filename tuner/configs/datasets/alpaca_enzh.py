"""Alpaca in English and Chinese."""

train_dataloader = dict(dataset=dict(mixture=[dict(part="alpaca"), dict(part="alpaca_zh")]))
