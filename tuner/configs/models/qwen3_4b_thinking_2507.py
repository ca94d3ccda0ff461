"""Qwen3 4B Thinking 2507, Alibaba's model that always thinks before it answers."""

model = dict(path="Qwen/Qwen3-4B-Thinking-2507")
architecture = "qwen3_4b_instruct_2507"
