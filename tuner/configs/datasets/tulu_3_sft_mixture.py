"""Tulu 3's instruction mix; 939,344 conversations; ODC-BY."""

train_dataloader = dict(dataset=dict(path="allenai/tulu-3-sft-mixture", format="messages"))
