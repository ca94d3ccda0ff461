"""RefinedWeb: 968 million web pages; plain text; ODC-BY."""

train_dataloader = dict(dataset=dict(path="tiiuae/falcon-refinedweb", format="text", columns=dict(text="content")))
