"""Mistral 7B v0.3, Mistral AI's base model with tokens for tools."""

model = dict(path="mistralai/Mistral-7B-v0.3", chat_template="mistral")
architecture = dict(_base_="mistral_7b", vocab_size=32768)
