"""Tiny Codes: 1.6 million short programs with explanations; gated; MIT."""

# The system turn is ours, with the meaning of XTuner's.
train_dataloader = dict(
    dataset=dict(
        path="nampdn-ai/tiny-codes",
        format="alpaca",
        system="You are an experienced programmer. Write the code that is asked for.",
    )
)
