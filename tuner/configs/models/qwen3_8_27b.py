"""Qwen3.8 27B, Alibaba's chat model with linear attention; its text half."""

model = dict(path="Qwen/Qwen3.8-27B")
architecture = "qwen3_5_27b"
