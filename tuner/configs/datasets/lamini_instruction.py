"""LaMini: 2.58 million instructions answered by GPT-3.5; CC BY-NC 4.0."""

train_dataloader = dict(dataset=dict(path="MBZUAI/LaMini-instruction", format="alpaca"))
