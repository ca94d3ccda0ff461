"""Conversations that users of ChatGPT shared, cleaned for Vicuna; about 94,000."""

# Named by its file: other files of the repository hold the same conversations in other states.
train_dataloader = dict(
    dataset=dict(
        path="hf://datasets/anon8231489123/ShareGPT_Vicuna_unfiltered/ShareGPT_V3_unfiltered_cleaned_split.json",
        format="sharegpt",
    )
)
