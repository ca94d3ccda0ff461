"""Qwen2.5 32B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen2.5-32B")
architecture = dict(
    _base_="qwen2_72b", num_hidden_layers=64, hidden_size=5120, intermediate_size=27648, num_attention_heads=40
)
