"""Science questions in Chinese, as HFL publishes them."""

train_dataloader = dict(dataset=dict(path="hfl/stem_zh_instruction", format="alpaca"))
