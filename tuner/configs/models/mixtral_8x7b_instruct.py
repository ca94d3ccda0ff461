"""Mixtral 8x7B Instruct, Mistral AI's chat model with 8 experts, 13B active."""

model = dict(path="mistralai/Mixtral-8x7B-Instruct-v0.1")
architecture = "mixtral_8x7b"
