"""Qwen3 8B Base, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen3-8B-Base")
architecture = dict(_base_="qwen3_8b", max_position_embeddings=32768)
