"""Short questions and answers written for tuner; validation asks in words that training does not use."""

train_dataloader = dict(dataset=dict(path="package:sample/train.jsonl", format="messages", max_length=256))
val_dataloader = dict(
    batch_size=1,
    num_workers=0,
    dataset=dict(
        path="package:sample/validation.jsonl",
        name=None,
        split="train",
        format="messages",
        max_length=256,
        packing=True,
    ),
)
log = dict(num_samples=8)
