"""TinyStories: 2,119,719 stories in a small child's words; plain text."""

train_dataloader = dict(dataset=dict(path="roneneldan/TinyStories", format="text"))
