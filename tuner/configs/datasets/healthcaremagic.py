"""ChatDoctor: 112,165 patients' questions answered by doctors."""

train_dataloader = dict(dataset=dict(path="lavita/ChatDoctor-HealthCareMagic-100k", format="alpaca"))
