"""Deita: 9,500 conversations chosen for complexity and quality."""

train_dataloader = dict(dataset=dict(path="HuggingFaceH4/deita-10k-v0-sft", split="train_sft", format="messages"))
