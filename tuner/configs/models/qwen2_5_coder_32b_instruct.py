"""Qwen2.5 Coder 32B Instruct, Alibaba's chat model for code."""

model = dict(path="Qwen/Qwen2.5-Coder-32B-Instruct")
architecture = "qwen2_5_32b_instruct"
