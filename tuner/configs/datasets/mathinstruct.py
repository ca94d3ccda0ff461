"""MathInstruct: 262,000 problems with steps or programs; MIT."""

train_dataloader = dict(dataset=dict(path="TIGER-Lab/MathInstruct", format="alpaca"))
