"""Qwen3 32B, Alibaba's chat model that can think before it answers."""

model = dict(path="Qwen/Qwen3-32B")
architecture = dict(
    _base_="qwen3_8b", num_hidden_layers=64, hidden_size=5120, intermediate_size=25600, num_attention_heads=64
)
