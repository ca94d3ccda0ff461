"""Your own conversations (OpenAI messages), under XTuner's name: name the file with --data."""

train_dataloader = dict(dataset=dict(format="messages"))
