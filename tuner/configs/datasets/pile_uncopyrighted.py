"""The Pile without its copyrighted parts; plain text."""

train_dataloader = dict(dataset=dict(path="monology/pile-uncopyrighted", format="text"))
