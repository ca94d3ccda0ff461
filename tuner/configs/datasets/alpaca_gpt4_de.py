"""GPT-4's Alpaca answers in German."""

train_dataloader = dict(dataset=dict(path="mayflowergmbh/alpaca-gpt4_de", format="alpaca"))
