"""Qwen3 0.6B, Alibaba's chat model that can think before it answers."""

model = dict(path="Qwen/Qwen3-0.6B")
architecture = dict(_base_="qwen3_1_7b", hidden_size=1024, intermediate_size=3072)
