"""Qwen2.5 Coder 0.5B, Alibaba's base model, trained on code."""

model = dict(path="Qwen/Qwen2.5-Coder-0.5B")
architecture = "qwen2_5_0_5b"
