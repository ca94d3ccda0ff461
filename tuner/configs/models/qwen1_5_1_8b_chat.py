"""Qwen1.5 1.8B Chat, Alibaba's chat model."""

model = dict(path="Qwen/Qwen1.5-1.8B-Chat")
architecture = "qwen1_5_1_8b"
