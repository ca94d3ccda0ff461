"""KoAlpaca v1.1a: 21,155 Korean questions and answers."""

train_dataloader = dict(dataset=dict(path="beomi/KoAlpaca-v1.1a", format="alpaca"))
