"""Qwen2.5 Math 7B, Alibaba's base model, trained on mathematics."""

model = dict(path="Qwen/Qwen2.5-Math-7B")
architecture = dict(_base_="qwen2_7b", max_position_embeddings=4096)
