"""ToolACE: 11,300 conversations with tools; Apache 2.0."""

train_dataloader = dict(dataset=dict(path="Team-ACE/ToolACE", format="sharegpt"))
