"""DAPO-Math-17k, deduplicated: 14,116 English problems with their answers, for GRPO."""

train_dataloader = dict(
    dataset=dict(
        path="open-r1/DAPO-Math-17k-Processed",
        name="en",
        format="alpaca",
        columns=dict(instruction="prompt", output="solution"),
    )
)
