"""Dolly: 15,011 instructions written by people at Databricks; CC BY-SA 3.0."""

train_dataloader = dict(
    dataset=dict(path="databricks/databricks-dolly-15k", format="alpaca", columns=dict(input="context"))
)
