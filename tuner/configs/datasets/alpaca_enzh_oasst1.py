"""Alpaca in English and Chinese, and the OpenAssistant conversations."""

train_dataloader = dict(dataset=dict(mixture=[dict(part="alpaca_enzh"), dict(part="oasst1")]))
