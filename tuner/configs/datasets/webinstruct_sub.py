"""WebInstruct: 2.3 million questions and answers found on the web; Apache 2.0."""

train_dataloader = dict(dataset=dict(path="TIGER-Lab/WebInstructSub", format="alpaca"))
