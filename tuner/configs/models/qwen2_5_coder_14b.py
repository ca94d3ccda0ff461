"""Qwen2.5 Coder 14B, Alibaba's base model, trained on code."""

model = dict(path="Qwen/Qwen2.5-Coder-14B")
architecture = "qwen2_5_14b_instruct"
