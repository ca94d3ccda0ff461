"""Questions of Stack Exchange with their best answers."""

# Named by its files: XTuner reads the folder data/finetune alone.
train_dataloader = dict(
    dataset=dict(
        path="hf://datasets/ArmelR/stack-exchange-instruction/data/finetune/*.parquet",
        format="alpaca",
        columns=dict(instruction="question", output="response"),
    )
)
