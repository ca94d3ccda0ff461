"""SAMSum: 14,732 chats and their summaries; CC BY-NC-ND 4.0."""

train_dataloader = dict(
    dataset=dict(
        path="knkarthick/samsum",
        format="alpaca",
        columns=dict(instruction="dialogue", output="summary"),
        system="Summarize the conversation.",
    )
)
