"""Llama 3 70B, Meta's base model with a context of 8 thousand tokens."""

model = dict(path="meta-llama/Meta-Llama-3-70B", chat_template="llama3")
architecture = dict(_base_="llama2_70b", vocab_size=128256, max_position_embeddings=8192)
