"""Llama 3.1 70B, Meta's base model with a context of 128 thousand tokens."""

model = dict(path="meta-llama/Llama-3.1-70B", chat_template="llama3_1")
architecture = dict(_base_="llama3_70b", max_position_embeddings=131072)
