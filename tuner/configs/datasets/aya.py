"""Aya: 202,362 instructions written by people in 65 languages; Apache 2.0."""

train_dataloader = dict(
    dataset=dict(path="CohereForAI/aya_dataset", format="alpaca", columns=dict(instruction="inputs", output="targets"))
)
