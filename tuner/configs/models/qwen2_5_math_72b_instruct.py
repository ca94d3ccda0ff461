"""Qwen2.5 Math 72B Instruct, Alibaba's chat model for mathematics."""

model = dict(path="Qwen/Qwen2.5-Math-72B-Instruct")
architecture = "qwen2_5_math_72b"
