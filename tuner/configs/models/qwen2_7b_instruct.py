"""Qwen2 7B Instruct, Alibaba's chat model."""

model = dict(path="Qwen/Qwen2-7B-Instruct")
architecture = "qwen2_5_7b_instruct"
