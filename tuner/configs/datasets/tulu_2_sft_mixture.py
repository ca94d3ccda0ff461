"""Tulu 2's instruction mix; 326,154 conversations; ODC-BY."""

train_dataloader = dict(dataset=dict(path="allenai/tulu-v2-sft-mixture", format="messages"))
