"""Qwen3-Coder-Next, Alibaba's chat model for code, 80B with 512 experts, 3B active."""

model = dict(path="Qwen/Qwen3-Coder-Next")
architecture = "qwen3_next_80b_a3b_instruct"
