"""Reddit's answers, pairs by votes; 348,718 pairs."""

# `labels` is 1 where A is the better one, so A is answer 1.
train_dataloader = dict(
    dataset=dict(
        path="stanfordnlp/SHP",
        format="better_response",
        columns=dict(prompt="history", response_0="human_ref_B", response_1="human_ref_A", better_response_id="labels"),
    )
)
