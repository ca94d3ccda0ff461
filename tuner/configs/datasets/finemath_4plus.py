"""FineMath-4+: 6,699,493 web pages that teach mathematics; plain text; ODC-BY."""

train_dataloader = dict(dataset=dict(path="HuggingFaceTB/finemath", name="finemath-4plus", format="text"))
