"""LongAlign: 9,888 questions on texts of 8,000 to 64,000 tokens."""

train_dataloader = dict(dataset=dict(path="THUDM/LongAlign-10k", format="messages", max_length=65536))
