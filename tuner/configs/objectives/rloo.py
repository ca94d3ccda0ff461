"""REINFORCE with a leave-one-out baseline: completions of prompts, compared by their rewards."""

objective = dict(type="rloo", rewards=["math"])
train_dataloader = dict(dataset=dict(max_length=512))
optim_wrapper = dict(optimizer=dict(lr=1e-6))
