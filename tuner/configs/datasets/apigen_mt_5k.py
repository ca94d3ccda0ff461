"""APIGen-MT: 5,000 conversations of an agent with tools and a user; gated; CC BY-NC 4.0."""

train_dataloader = dict(dataset=dict(path="Salesforce/APIGen-MT-5k", format="sharegpt"))
