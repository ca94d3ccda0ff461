"""MetaMathQA: 395,000 problems grown from GSM8K and MATH; MIT."""

train_dataloader = dict(dataset=dict(path="meta-math/MetaMathQA", format="alpaca"))
