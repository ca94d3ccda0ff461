"""Qwen2.5 Coder 1.5B, Alibaba's base model, trained on code."""

model = dict(path="Qwen/Qwen2.5-Coder-1.5B")
architecture = "qwen2_5_1_5b_instruct"
