"""Qwen1.5 110B Chat, Alibaba's chat model."""

model = dict(path="Qwen/Qwen1.5-110B-Chat")
architecture = "qwen1_5_110b"
