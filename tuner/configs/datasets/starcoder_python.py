"""StarCoder's Python files; gated; plain text."""

# Named by its files: the repository has one folder for each language.
train_dataloader = dict(
    dataset=dict(
        path="hf://datasets/bigcode/starcoderdata/python/*.parquet", format="text", columns=dict(text="content")
    )
)
