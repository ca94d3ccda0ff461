"""Qwen2.5 0.5B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen2.5-0.5B")
architecture = dict(_base_="qwen2_0_5b", max_position_embeddings=32768)
