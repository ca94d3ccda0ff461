"""Llama 3.1 8B, Meta's base model with a context of 128 thousand tokens."""

model = dict(path="meta-llama/Llama-3.1-8B", chat_template="llama3_1")
architecture = dict(_base_="llama3_8b", max_position_embeddings=131072)
