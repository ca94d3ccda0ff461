"""Llama 3.2 3B Instruct, Meta's small chat model."""

model = dict(path="meta-llama/Llama-3.2-3B-Instruct", chat_template="llama3_1")
architecture = "llama3_2_3b"
