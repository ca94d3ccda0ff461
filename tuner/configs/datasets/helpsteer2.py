"""HelpSteer2: 20,324 prompts with answers of all qualities; CC BY 4.0."""

train_dataloader = dict(dataset=dict(path="nvidia/HelpSteer2", format="alpaca"))
