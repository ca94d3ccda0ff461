"""Qwen1.5 14B Chat, Alibaba's chat model."""

model = dict(path="Qwen/Qwen1.5-14B-Chat")
architecture = "qwen1_5_14b"
