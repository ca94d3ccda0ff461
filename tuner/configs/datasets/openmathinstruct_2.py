"""OpenMathInstruct-2: 14 million problems solved by Llama 3.1 405B; CC BY 4.0."""

train_dataloader = dict(
    dataset=dict(
        path="nvidia/OpenMathInstruct-2",
        format="alpaca",
        columns=dict(problem="problem", solution="generated_solution"),
    )
)
