"""Programming tasks evolved with GPT-4; 111,272 rows; Apache 2.0."""

train_dataloader = dict(dataset=dict(path="theblackcat102/evol-codealpaca-v1", format="alpaca"))
