"""Cosmopedia v2: 39 million textbook pages by Mixtral; plain text; ODC-BY."""

train_dataloader = dict(dataset=dict(path="HuggingFaceTB/smollm-corpus", name="cosmopedia-v2", format="text"))
