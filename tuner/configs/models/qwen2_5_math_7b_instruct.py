"""Qwen2.5 Math 7B Instruct, Alibaba's chat model for mathematics."""

model = dict(path="Qwen/Qwen2.5-Math-7B-Instruct")
architecture = "qwen2_5_math_7b"
