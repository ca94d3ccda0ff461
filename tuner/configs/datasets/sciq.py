"""SciQ: 11,679 science questions with a text that answers them; CC BY-NC 3.0."""

train_dataloader = dict(
    dataset=dict(
        path="allenai/sciq",
        format="alpaca",
        columns=dict(instruction="{support}\n\n{question}", output="correct_answer"),
    )
)
