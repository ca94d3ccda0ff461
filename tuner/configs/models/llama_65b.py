"""Llama 65B, Meta's first base model, trained on text."""

model = dict(path="huggyllama/llama-65b", chat_template="llama2")
architecture = dict(_base_="llama2_70b", intermediate_size=22016, num_key_value_heads=64, max_position_embeddings=2048)
