"""Open-Platypus: 24,926 questions of science and logic, from eleven collections."""

train_dataloader = dict(dataset=dict(path="garage-bAInd/Open-Platypus", format="alpaca"))
