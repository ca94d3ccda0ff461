"""Small Python tasks; 18,612 rows."""

train_dataloader = dict(dataset=dict(path="iamtarun/python_code_instructions_18k_alpaca", format="alpaca"))
