"""Gemma 7B Instruct, Google's chat model; it does not support system turns."""

model = dict(path="google/gemma-7b-it")
architecture = "gemma_7b"
