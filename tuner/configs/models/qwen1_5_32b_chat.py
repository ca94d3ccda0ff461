"""Qwen1.5 32B Chat, Alibaba's chat model."""

model = dict(path="Qwen/Qwen1.5-32B-Chat")
architecture = "qwen1_5_32b"
