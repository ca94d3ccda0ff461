"""Llama 2 13B, Meta's base model, trained on text."""

model = dict(path="meta-llama/Llama-2-13b-hf", chat_template="llama2")
architecture = dict(_base_="llama_13b", max_position_embeddings=4096)
