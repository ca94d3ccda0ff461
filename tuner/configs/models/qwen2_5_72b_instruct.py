"""Qwen2.5 72B Instruct, Alibaba's chat model."""

model = dict(path="Qwen/Qwen2.5-72B-Instruct")
architecture = "qwen2_72b_instruct"
