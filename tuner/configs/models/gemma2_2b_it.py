"""Gemma 2 2B Instruct, Google's chat model; it does not support system turns."""

model = dict(path="google/gemma-2-2b-it")
architecture = "gemma2_2b"
