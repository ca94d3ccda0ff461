"""Qwen2.5 Coder 3B Instruct, Alibaba's chat model for code."""

model = dict(path="Qwen/Qwen2.5-Coder-3B-Instruct")
architecture = "qwen2_5_3b"
