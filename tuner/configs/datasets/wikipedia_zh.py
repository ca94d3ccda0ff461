"""Wikipedia in Chinese of November 2023, 1.4 million articles; plain text."""

train_dataloader = dict(dataset=dict(path="wikimedia/wikipedia", name="20231101.zh", format="text"))
