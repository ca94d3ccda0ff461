"""Qwen3.8 2.4T-A95B, Alibaba's chat model with linear attention and 512 experts; planned from its config.json."""

model = dict(path="Qwen/Qwen3.8-2.4T-A95B")
