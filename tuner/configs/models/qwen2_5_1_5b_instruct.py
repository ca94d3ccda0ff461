"""Qwen2.5 1.5B Instruct, Alibaba's chat model."""

model = dict(path="Qwen/Qwen2.5-1.5B-Instruct")
architecture = dict(_base_="qwen2_1_5b", max_position_embeddings=32768)
