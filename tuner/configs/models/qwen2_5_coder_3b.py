"""Qwen2.5 Coder 3B, Alibaba's base model, trained on code."""

model = dict(path="Qwen/Qwen2.5-Coder-3B")
architecture = "qwen2_5_3b"
