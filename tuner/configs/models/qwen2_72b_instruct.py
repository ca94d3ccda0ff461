"""Qwen2 72B Instruct, Alibaba's chat model."""

model = dict(path="Qwen/Qwen2-72B-Instruct")
architecture = dict(_base_="qwen2_72b", max_position_embeddings=32768)
