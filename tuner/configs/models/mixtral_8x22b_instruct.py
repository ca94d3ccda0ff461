"""Mixtral 8x22B Instruct, Mistral AI's chat model with 8 experts, 39B active."""

model = dict(path="mistralai/Mixtral-8x22B-Instruct-v0.1")
architecture = dict(_base_="mixtral_8x22b", vocab_size=32768)
