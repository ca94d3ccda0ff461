"""OpenOrca: 4.2 million FLAN questions answered by GPT-4 and GPT-3.5; MIT."""

train_dataloader = dict(
    dataset=dict(
        path="Open-Orca/OpenOrca",
        format="alpaca",
        columns=dict(system="system_prompt", instruction="question", output="response"),
    )
)
