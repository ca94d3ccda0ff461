"""Qwen2 1.5B Instruct, Alibaba's chat model."""

model = dict(path="Qwen/Qwen2-1.5B-Instruct")
architecture = "qwen2_5_1_5b_instruct"
