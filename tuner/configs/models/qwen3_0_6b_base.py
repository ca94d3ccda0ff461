"""Qwen3 0.6B Base, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen3-0.6B-Base")
architecture = dict(_base_="qwen3_0_6b", max_position_embeddings=32768)
