"""Qwen2.5 Coder 1.5B Instruct, Alibaba's chat model for code."""

model = dict(path="Qwen/Qwen2.5-Coder-1.5B-Instruct")
architecture = "qwen2_5_1_5b_instruct"
