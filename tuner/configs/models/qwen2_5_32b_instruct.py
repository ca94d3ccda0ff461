"""Qwen2.5 32B Instruct, Alibaba's chat model."""

model = dict(path="Qwen/Qwen2.5-32B-Instruct")
architecture = dict(_base_="qwen2_5_32b", max_position_embeddings=32768)
