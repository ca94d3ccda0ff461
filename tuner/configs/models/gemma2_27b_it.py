"""Gemma 2 27B Instruct, Google's chat model; it does not support system turns."""

model = dict(path="google/gemma-2-27b-it")
architecture = "gemma2_27b"
