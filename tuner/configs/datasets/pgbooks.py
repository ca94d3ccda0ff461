"""PG-19: 28,602 whole books of Project Gutenberg, 65,536 tokens of each; plain text."""

# XTuner reads a copy that was tokenized for Llama; this is the text itself, for any tokenizer.
objective = dict(type="pretrain")
train_dataloader = dict(dataset=dict(path="emozilla/pg19", format="text", max_length=65536, packing=False))
