"""CodeParrot: 5.4 million Python files of GitHub; plain text."""

train_dataloader = dict(dataset=dict(path="codeparrot/codeparrot-clean", format="text", columns=dict(text="content")))
