"""WikiText-103: good Wikipedia articles, line by line, 1,801,350 lines; plain text."""

train_dataloader = dict(dataset=dict(path="Salesforce/wikitext", name="wikitext-103-raw-v1", format="text"))
