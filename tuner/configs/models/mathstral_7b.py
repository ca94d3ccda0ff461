"""Mathstral 7B, Mistral AI's chat model for mathematics."""

model = dict(path="mistralai/Mathstral-7B-v0.1")
architecture = "mistral_7b_v0_3"
