"""Qwen2.5 Coder 32B, Alibaba's base model, trained on code."""

model = dict(path="Qwen/Qwen2.5-Coder-32B")
architecture = "qwen2_5_32b_instruct"
