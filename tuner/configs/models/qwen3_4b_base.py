"""Qwen3 4B Base, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen3-4B-Base")
architecture = dict(_base_="qwen3_4b", max_position_embeddings=32768)
