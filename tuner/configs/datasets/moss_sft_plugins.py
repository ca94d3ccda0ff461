"""MOSS's conversations in which it searches, calculates and solves; expects its file in ./data."""

# From fnlp/moss-003-sft-data on the hub, unzipped. Not packed, as in XTuner.
train_dataloader = dict(
    dataset=dict(
        path="./data/conversations_with_tools_with_inner_instruction_no_text2image_train_*.jsonl",
        format="moss",
        packing=False,
    )
)
