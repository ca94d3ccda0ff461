"""Online DPO: two completions of each prompt, and the one with the higher reward is preferred."""

objective = dict(type="online_dpo", rewards=["math"])
train_dataloader = dict(dataset=dict(max_length=512))
optim_wrapper = dict(optimizer=dict(lr=5e-7))
