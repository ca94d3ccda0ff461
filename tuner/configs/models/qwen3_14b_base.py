"""Qwen3 14B Base, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen3-14B-Base")
architecture = dict(_base_="qwen3_14b", max_position_embeddings=32768)
