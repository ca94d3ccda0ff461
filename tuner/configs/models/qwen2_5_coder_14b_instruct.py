"""Qwen2.5 Coder 14B Instruct, Alibaba's chat model for code."""

model = dict(path="Qwen/Qwen2.5-Coder-14B-Instruct")
architecture = "qwen2_5_14b_instruct"
