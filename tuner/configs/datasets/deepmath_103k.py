"""DeepMath-103K: hard problems, each with DeepSeek-R1's solution; MIT."""

train_dataloader = dict(
    dataset=dict(
        path="zwhe99/DeepMath-103K", format="alpaca", columns=dict(instruction="question", output="r1_solution_1")
    )
)
