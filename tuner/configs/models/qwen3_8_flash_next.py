"""Qwen3.8 Flash-Next 180B, Alibaba's chat model that reads images; planned from its config.json."""

model = dict(path="Qwen/Qwen3.8-Flash-Next")
