"""OpenR1-Math: 93,733 problems with DeepSeek-R1's verified thoughts; Apache 2.0."""

train_dataloader = dict(dataset=dict(path="open-r1/OpenR1-Math-220k", name="default", format="messages"))
