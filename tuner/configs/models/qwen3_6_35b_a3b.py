"""Qwen3.6 35B-A3B, Alibaba's chat model with 256 experts, 3B active; its text half."""

model = dict(path="Qwen/Qwen3.6-35B-A3B")
architecture = "qwen3_5_35b_a3b"
