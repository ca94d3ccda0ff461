"""Finance questions and answers; 68,912 rows; MIT."""

train_dataloader = dict(dataset=dict(path="gbharti/finance-alpaca", format="alpaca"))
