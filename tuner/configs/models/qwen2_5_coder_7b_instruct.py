"""Qwen2.5 Coder 7B Instruct, Alibaba's chat model for code."""

model = dict(path="Qwen/Qwen2.5-Coder-7B-Instruct")
architecture = "qwen2_5_7b_instruct"
