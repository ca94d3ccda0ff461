"""HelpSteer: 35,331 prompts with answers of all qualities; CC BY 4.0."""

train_dataloader = dict(dataset=dict(path="nvidia/HelpSteer", format="alpaca"))
