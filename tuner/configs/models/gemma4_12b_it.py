"""Gemma 4 12B Instruct, Google's chat model that sees and hears without a tower; planned from its config.json."""

model = dict(path="google/gemma-4-12B-it")
