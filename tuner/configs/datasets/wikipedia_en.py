"""Wikipedia in English of November 2023, 6.4 million articles; plain text."""

train_dataloader = dict(dataset=dict(path="wikimedia/wikipedia", name="20231101.en", format="text"))
