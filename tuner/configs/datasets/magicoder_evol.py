"""Magicoder Evol-Instruct: 111,183 decontaminated programming tasks; Apache 2.0."""

train_dataloader = dict(dataset=dict(path="ise-uiuc/Magicoder-Evol-Instruct-110K", format="alpaca"))
