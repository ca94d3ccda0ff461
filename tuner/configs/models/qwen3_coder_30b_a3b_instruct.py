"""Qwen3 Coder 30B-A3B Instruct, Alibaba's chat model for code with 128 experts, 3B active."""

model = dict(path="Qwen/Qwen3-Coder-30B-A3B-Instruct")
architecture = dict(_base_="qwen3_30b_a3b", intermediate_size=5472, max_position_embeddings=262144)
