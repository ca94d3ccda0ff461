"""Dolly in Japanese; 15,015 rows; CC BY-SA 3.0."""

train_dataloader = dict(dataset=dict(path="kunishou/databricks-dolly-15k-ja", format="alpaca"))
