"""Qwen2.5 7B Instruct, Alibaba's chat model."""

model = dict(path="Qwen/Qwen2.5-7B-Instruct")
architecture = dict(_base_="qwen2_7b", max_position_embeddings=32768)
