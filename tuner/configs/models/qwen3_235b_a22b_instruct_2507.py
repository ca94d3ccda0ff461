"""Qwen3 235B-A22B Instruct 2507, Alibaba's chat model with 128 experts, 22B active."""

model = dict(path="Qwen/Qwen3-235B-A22B-Instruct-2507")
architecture = dict(_base_="qwen3_235b_a22b", max_position_embeddings=262144)
