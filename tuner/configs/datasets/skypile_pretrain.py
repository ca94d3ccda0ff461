"""SkyPile-150B: Chinese web pages, 150 billion tokens; plain text."""

objective = dict(type="pretrain")
train_dataloader = dict(dataset=dict(path="Skywork/SkyPile-150B", format="text"))
