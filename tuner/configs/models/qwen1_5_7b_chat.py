"""Qwen1.5 7B Chat, Alibaba's chat model."""

model = dict(path="Qwen/Qwen1.5-7B-Chat")
architecture = "qwen1_5_7b"
