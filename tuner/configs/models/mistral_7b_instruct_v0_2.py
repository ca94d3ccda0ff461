"""Mistral 7B Instruct v0.2, Mistral AI's chat model."""

model = dict(path="mistralai/Mistral-7B-Instruct-v0.2")
architecture = "mistral_7b"
