"""Llama 2 7B, Meta's base model, trained on text."""

model = dict(path="meta-llama/Llama-2-7b-hf", chat_template="llama2")
architecture = dict(_base_="llama_7b", max_position_embeddings=4096)
