"""Qwen2.5 Coder 7B, Alibaba's base model, trained on code."""

model = dict(path="Qwen/Qwen2.5-Coder-7B")
architecture = "qwen2_5_7b_instruct"
