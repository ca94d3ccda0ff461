"""Qwen2.5 Math 1.5B, Alibaba's base model, trained on mathematics."""

model = dict(path="Qwen/Qwen2.5-Math-1.5B")
architecture = dict(_base_="qwen2_1_5b", max_position_embeddings=4096)
