"""Qwen1.5 72B Chat, Alibaba's chat model."""

model = dict(path="Qwen/Qwen1.5-72B-Chat")
architecture = "qwen1_5_72b"
