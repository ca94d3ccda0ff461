"""LIMO: 817 hard problems with long solutions; Apache 2.0."""

train_dataloader = dict(
    dataset=dict(path="GAIR/LIMO", format="alpaca", columns=dict(instruction="question", output="solution"))
)
