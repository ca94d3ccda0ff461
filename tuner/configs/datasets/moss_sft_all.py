"""MOSS's conversations without and with plugins; expects their two files in ./data."""

# From fnlp/moss-003-sft-data on the hub, unzipped. Not packed, as in XTuner.
train_dataloader = dict(
    dataset=dict(
        mixture=[dict(path="./data/moss-003-sft-no-tools.jsonl", format="moss"), dict(part="moss_sft_plugins")],
        packing=False,
    )
)
