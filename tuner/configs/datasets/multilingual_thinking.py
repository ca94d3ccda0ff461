"""Multilingual-Thinking: 1,000 questions with thoughts in five languages, made for gpt-oss."""

train_dataloader = dict(dataset=dict(path="HuggingFaceH4/Multilingual-Thinking", format="messages"))
