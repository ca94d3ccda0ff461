"""Programming tasks evolved with GPT-3.5; 78,264 rows; CC BY-NC-SA 4.0."""

train_dataloader = dict(dataset=dict(path="nickrosh/Evol-Instruct-Code-80k-v1", format="alpaca"))
