"""Bespoke-Stratos: 16,710 questions with DeepSeek-R1's thoughts; Apache 2.0."""

train_dataloader = dict(dataset=dict(path="bespokelabs/Bespoke-Stratos-17k", format="sharegpt"))
