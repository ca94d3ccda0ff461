"""Qwen3 1.7B, Alibaba's chat model that can think before it answers."""

model = dict(path="Qwen/Qwen3-1.7B")
architecture = dict(
    _base_="qwen3_4b", num_hidden_layers=28, hidden_size=2048, intermediate_size=6144, num_attention_heads=16
)
