"""Mistral Small 4 119B, Mistral AI's chat model that also sees; 8-bit weights; planned from its config.json."""

model = dict(path="mistralai/Mistral-Small-4-119B-2603")
