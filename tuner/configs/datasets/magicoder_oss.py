"""Magicoder OSS-Instruct: 75,197 tasks grown from open-source code; MIT."""

train_dataloader = dict(dataset=dict(path="ise-uiuc/Magicoder-OSS-Instruct-75K", format="alpaca"))
