"""Gemma 3 270M Instruct, Google's smallest chat model."""

model = dict(path="google/gemma-3-270m-it")
architecture = "gemma3_270m"
