"""LongAlpaca: 12,000 questions, most on whole papers and books; CC BY-NC 4.0."""

train_dataloader = dict(dataset=dict(path="Yukang/LongAlpaca-12k", format="alpaca", max_length=32768))
