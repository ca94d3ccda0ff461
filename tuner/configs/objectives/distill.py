"""On-policy distillation: completions of prompts, and the probabilities that a teacher gives them."""

objective = dict(type="distill")
train_dataloader = dict(dataset=dict(max_length=512))
optim_wrapper = dict(optimizer=dict(lr=1e-6))
