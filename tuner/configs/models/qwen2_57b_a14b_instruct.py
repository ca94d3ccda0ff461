"""Qwen2 57B-A14B Instruct, Alibaba's chat model with 64 experts, 14B active."""

model = dict(path="Qwen/Qwen2-57B-A14B-Instruct")
architecture = dict(_base_="qwen2_57b_a14b", max_position_embeddings=32768)
