"""Sky-T1: 16,401 questions with QwQ's thoughts, rewritten; Apache 2.0."""

train_dataloader = dict(dataset=dict(path="NovaSky-AI/Sky-T1_data_17k", format="sharegpt"))
