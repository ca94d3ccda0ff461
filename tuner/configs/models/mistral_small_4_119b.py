"""Mistral Small 4 119B, Mistral AI's chat model with 128 experts that also sees; planned from its config.json."""

model = dict(path="mistralai/Mistral-Small-4-119B-2603")
