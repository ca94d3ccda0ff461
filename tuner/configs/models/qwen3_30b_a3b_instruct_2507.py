"""Qwen3 30B-A3B Instruct 2507, Alibaba's chat model with 128 experts, 3B active."""

model = dict(path="Qwen/Qwen3-30B-A3B-Instruct-2507")
architecture = dict(_base_="qwen3_30b_a3b", max_position_embeddings=262144)
