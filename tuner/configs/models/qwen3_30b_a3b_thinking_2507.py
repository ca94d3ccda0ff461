"""Qwen3 30B-A3B Thinking 2507, Alibaba's model with 128 experts that always thinks first."""

model = dict(path="Qwen/Qwen3-30B-A3B-Thinking-2507")
architecture = "qwen3_30b_a3b_instruct_2507"
