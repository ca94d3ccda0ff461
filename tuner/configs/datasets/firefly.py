"""Firefly: 1,649,399 Chinese rows of 23 tasks."""

train_dataloader = dict(
    dataset=dict(
        path="YeungNLP/firefly-train-1.1M", format="alpaca", columns=dict(instruction="input", output="target")
    )
)
