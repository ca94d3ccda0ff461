"""Mathematical questions with better and worse answers; 2,418 pairs; Apache 2.0."""

train_dataloader = dict(
    dataset=dict(
        path="argilla/distilabel-math-preference-dpo",
        format="preference",
        columns=dict(chosen="chosen_response", rejected="rejected_response"),
    )
)
