"""Qwen2.5 1.5B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen2.5-1.5B")
architecture = "qwen2_1_5b"
