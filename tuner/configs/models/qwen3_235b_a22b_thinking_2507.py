"""Qwen3 235B-A22B Thinking 2507, Alibaba's model with 128 experts that always thinks first."""

model = dict(path="Qwen/Qwen3-235B-A22B-Thinking-2507")
architecture = "qwen3_235b_a22b_instruct_2507"
