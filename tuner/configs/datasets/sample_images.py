"""Pictures of a shape, drawn for tuner, with questions about its color and its form."""

train_dataloader = dict(dataset=dict(path="package:sample_images/train.jsonl", format="messages", max_length=128))
val_dataloader = dict(
    batch_size=1,
    num_workers=0,
    dataset=dict(
        path="package:sample_images/validation.jsonl",
        name=None,
        split="train",
        format="messages",
        max_length=128,
        packing=True,
    ),
)
log = dict(num_samples=8)
