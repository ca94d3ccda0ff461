"""Answers of Stack Exchange, pairs by votes."""

# Named by its files: the folder data/rl is the part for preferences.
train_dataloader = dict(
    dataset=dict(
        path="hf://datasets/lvwerra/stack-exchange-paired/data/rl/*.parquet",
        format="preference",
        columns=dict(prompt="question", chosen="response_j", rejected="response_k"),
    )
)
