"""OpenAssistant's conversations in German."""

train_dataloader = dict(dataset=dict(path="mayflowergmbh/oasst_de", format="alpaca"))
