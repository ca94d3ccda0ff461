"""CodeAlpaca as it was first published; 20,022 programming tasks; CC BY 4.0."""

train_dataloader = dict(dataset=dict(path="sahil2801/CodeAlpaca-20k", format="alpaca"))
