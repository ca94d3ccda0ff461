"""Qwen2.5 72B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen2.5-72B")
architecture = "qwen2_72b"
