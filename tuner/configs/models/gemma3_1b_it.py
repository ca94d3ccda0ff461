"""Gemma 3 1B Instruct, Google's chat model."""

model = dict(path="google/gemma-3-1b-it")
architecture = "gemma3_1b_pt"
