"""Code-Feedback: 66,383 programming conversations in which programs run; Apache 2.0."""

train_dataloader = dict(dataset=dict(path="m-a-p/Code-Feedback", format="messages"))
