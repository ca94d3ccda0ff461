"""Gemma 1.1 7B Instruct, Google's chat model; it does not support system turns."""

model = dict(path="google/gemma-1.1-7b-it")
architecture = "gemma_7b"
