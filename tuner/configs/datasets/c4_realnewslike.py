"""C4's news-like pages, 13.8 million; plain text; ODC-BY."""

train_dataloader = dict(dataset=dict(path="allenai/c4", name="realnewslike", format="text"))
