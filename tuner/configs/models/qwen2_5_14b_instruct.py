"""Qwen2.5 14B Instruct, Alibaba's chat model."""

model = dict(path="Qwen/Qwen2.5-14B-Instruct")
architecture = dict(_base_="qwen2_5_14b", max_position_embeddings=32768)
