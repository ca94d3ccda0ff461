"""Mistral 7B Instruct v0.3, Mistral AI's chat model."""

model = dict(path="mistralai/Mistral-7B-Instruct-v0.3", chat_template="mistral")
architecture = "mistral_7b_v0_3"
