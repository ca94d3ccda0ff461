"""Llama 3.1 70B Instruct, Meta's chat model with a context of 128 thousand tokens."""

model = dict(path="meta-llama/Llama-3.1-70B-Instruct", chat_template="llama3_1")
architecture = "llama3_1_70b"
