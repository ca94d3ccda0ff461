"""Gemma 2 9B Instruct, Google's chat model; it does not support system turns."""

model = dict(path="google/gemma-2-9b-it")
architecture = "gemma2_9b"
