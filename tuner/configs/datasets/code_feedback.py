"""CodeFeedback: 156,526 filtered programming questions; Apache 2.0."""

train_dataloader = dict(
    dataset=dict(
        path="m-a-p/CodeFeedback-Filtered-Instruction", format="alpaca", columns=dict(query="query", response="answer")
    )
)
