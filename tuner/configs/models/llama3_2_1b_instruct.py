"""Llama 3.2 1B Instruct, Meta's smallest chat model."""

model = dict(path="meta-llama/Llama-3.2-1B-Instruct", chat_template="llama3_1")
architecture = "llama3_2_1b"
