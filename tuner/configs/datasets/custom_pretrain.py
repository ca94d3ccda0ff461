"""Your own plain text, under XTuner's name: name the file with --data."""

objective = dict(type="pretrain")
train_dataloader = dict(dataset=dict(format="text"))
