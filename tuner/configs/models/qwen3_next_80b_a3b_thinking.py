"""Qwen3-Next 80B-A3B Thinking, Alibaba's model with linear attention that always thinks first."""

model = dict(path="Qwen/Qwen3-Next-80B-A3B-Thinking")
architecture = "qwen3_next_80b_a3b_instruct"
