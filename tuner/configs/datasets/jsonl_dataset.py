"""Your own preference pairs, under XTuner's name: name the file with --data."""

train_dataloader = dict(dataset=dict(format="preference"))
