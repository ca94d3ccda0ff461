"""Mistral 7B Instruct v0.1, Mistral AI's first chat model."""

model = dict(path="mistralai/Mistral-7B-Instruct-v0.1")
architecture = "mistral_7b"
