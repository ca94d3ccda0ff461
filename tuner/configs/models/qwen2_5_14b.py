"""Qwen2.5 14B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen2.5-14B")
architecture = dict(_base_="qwen2_5_32b", num_hidden_layers=48, intermediate_size=13824)
