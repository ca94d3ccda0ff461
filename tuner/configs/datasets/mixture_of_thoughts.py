"""Mixture-of-Thoughts: 349,317 verified thoughts on mathematics, code and science."""

train_dataloader = dict(dataset=dict(path="open-r1/Mixture-of-Thoughts", name="all", format="messages"))
