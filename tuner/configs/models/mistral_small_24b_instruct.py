"""Mistral Small 3 24B Instruct, Mistral AI's chat model."""

model = dict(path="mistralai/Mistral-Small-24B-Instruct-2501")
architecture = "mistral_small_24b"
