"""Gemma 3 27B Instruct, Google's chat model that also sees; its text half."""

model = dict(path="google/gemma-3-27b-it")
architecture = "gemma3_27b_pt"
