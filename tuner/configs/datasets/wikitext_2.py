"""WikiText-2: good Wikipedia articles, line by line, 36,718 lines; plain text."""

train_dataloader = dict(dataset=dict(path="Salesforce/wikitext", name="wikitext-2-raw-v1", format="text"))
