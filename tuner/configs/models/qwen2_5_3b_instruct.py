"""Qwen2.5 3B Instruct, Alibaba's chat model."""

model = dict(path="Qwen/Qwen2.5-3B-Instruct")
architecture = "qwen2_5_3b"
