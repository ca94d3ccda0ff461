"""CodeAlpaca: 18,019 small programming tasks."""

# The system turn is ours, with the meaning of XTuner's.
train_dataloader = dict(
    dataset=dict(
        path="HuggingFaceH4/CodeAlpaca_20K",
        format="prompt_completion",
        system="You are an experienced programmer. Write the code that is asked for.",
    )
)
