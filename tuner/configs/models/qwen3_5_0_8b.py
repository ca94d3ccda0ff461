"""Qwen3.5 0.8B, Alibaba's chat model with linear attention; its text half."""

model = dict(path="Qwen/Qwen3.5-0.8B")
architecture = dict(_base_="qwen3_5_2b", hidden_size=1024, intermediate_size=3584)
