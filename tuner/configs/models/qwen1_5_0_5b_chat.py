"""Qwen1.5 0.5B Chat, Alibaba's chat model."""

model = dict(path="Qwen/Qwen1.5-0.5B-Chat")
architecture = "qwen1_5_0_5b"
