"""Qwen3 1.7B Base, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen3-1.7B-Base")
architecture = dict(_base_="qwen3_1_7b", max_position_embeddings=32768)
