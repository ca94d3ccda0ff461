"""Gemma 3 12B Instruct, Google's chat model that also sees; its text half."""

model = dict(path="google/gemma-3-12b-it")
architecture = "gemma3_12b_pt"
