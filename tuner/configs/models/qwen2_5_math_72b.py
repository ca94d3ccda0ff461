"""Qwen2.5 Math 72B, Alibaba's base model, trained on mathematics."""

model = dict(path="Qwen/Qwen2.5-Math-72B")
architecture = dict(_base_="qwen2_72b", max_position_embeddings=4096)
