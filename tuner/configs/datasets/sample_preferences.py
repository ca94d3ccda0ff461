"""Short questions written for tuner, each with a right answer and a wrong or rude one; for preference objectives."""

train_dataloader = dict(
    dataset=dict(path="package:sample_preferences/train.jsonl", format="preference", max_length=256)
)
val_dataloader = dict(
    batch_size=4,
    num_workers=0,
    dataset=dict(
        path="package:sample_preferences/validation.jsonl",
        name=None,
        split="train",
        format="preference",
        max_length=256,
        packing=False,
    ),
)
