"""One million conversations of LMSYS's Chatbot Arena with 25 models; gated."""

train_dataloader = dict(dataset=dict(path="lmsys/lmsys-chat-1m", format="messages"))
