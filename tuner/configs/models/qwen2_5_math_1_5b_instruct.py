"""Qwen2.5 Math 1.5B Instruct, Alibaba's chat model for mathematics."""

model = dict(path="Qwen/Qwen2.5-Math-1.5B-Instruct")
architecture = "qwen2_5_math_1_5b"
