"""Qwen1.5 4B Chat, Alibaba's chat model."""

model = dict(path="Qwen/Qwen1.5-4B-Chat")
architecture = "qwen1_5_4b"
