"""Qwen2.5 7B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen2.5-7B")
architecture = "qwen2_7b"
