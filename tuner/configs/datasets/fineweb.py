"""FineWeb's sample of ten billion tokens; plain text; ODC-BY."""

train_dataloader = dict(dataset=dict(path="HuggingFaceFW/fineweb", name="sample-10BT", format="text"))
