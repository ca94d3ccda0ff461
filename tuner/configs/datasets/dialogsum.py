"""DialogSum: 12,460 conversations and their summaries."""

train_dataloader = dict(
    dataset=dict(
        path="knkarthick/dialogsum",
        format="alpaca",
        columns=dict(instruction="dialogue", output="summary"),
        system="Summarize the conversation.",
    )
)
