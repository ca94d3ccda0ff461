"""Qwen3 30B-A3B Base, Alibaba's base model with 128 experts, 3B active."""

model = dict(path="Qwen/Qwen3-30B-A3B-Base")
architecture = dict(_base_="qwen3_30b_a3b", max_position_embeddings=32768)
