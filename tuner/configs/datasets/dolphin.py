"""Dolphin: one million FLAN questions answered by GPT-4; Apache 2.0."""

# Its `instruction` is what others call the system turn.
train_dataloader = dict(
    dataset=dict(
        path="cognitivecomputations/dolphin",
        name="flan1m-alpaca-uncensored",
        format="alpaca",
        columns=dict(system="instruction", instruction="input", output="output"),
    )
)
