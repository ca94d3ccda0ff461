"""IMDB's film reviews, 25,000, good and bad; plain text."""

train_dataloader = dict(dataset=dict(path="stanfordnlp/imdb", format="text"))
