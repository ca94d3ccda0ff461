"""A sample of Cosmopedia, 100,000 textbook pages by Mixtral; plain text; Apache 2.0."""

train_dataloader = dict(dataset=dict(path="HuggingFaceTB/cosmopedia-100k", format="text"))
