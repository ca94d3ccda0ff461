"""Gemma 3 4B Instruct, Google's chat model that also sees; its text half."""

model = dict(path="google/gemma-3-4b-it")
architecture = "gemma3_4b_pt"
