"""Qwen2 0.5B Instruct, Alibaba's chat model."""

model = dict(path="Qwen/Qwen2-0.5B-Instruct")
architecture = "qwen2_5_0_5b"
