"""Geometric-mean policy optimization: GRPO with one ratio a completion, the geometric mean of its tokens' ratios."""

objective = dict(type="gmpo", rewards=["math"])
train_dataloader = dict(dataset=dict(max_length=512))
optim_wrapper = dict(optimizer=dict(lr=1e-6))
