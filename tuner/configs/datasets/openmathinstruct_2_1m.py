"""OpenMathInstruct-2, the million that NVIDIA drew from it; CC BY 4.0."""

train_dataloader = dict(
    dataset=dict(
        split="train_1M",
        path="nvidia/OpenMathInstruct-2",
        format="alpaca",
        columns=dict(problem="problem", solution="generated_solution"),
    )
)
