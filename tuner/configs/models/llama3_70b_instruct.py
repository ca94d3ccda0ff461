"""Llama 3 70B Instruct, Meta's chat model with a context of 8 thousand tokens."""

model = dict(path="meta-llama/Meta-Llama-3-70B-Instruct")
architecture = "llama3_70b"
