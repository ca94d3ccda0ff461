"""WildChat: conversations of users with ChatGPT in many languages; ODC-BY."""

train_dataloader = dict(dataset=dict(path="allenai/WildChat-1M", format="messages"))
