"""Qwen3 14B, Alibaba's chat model that can think before it answers."""

model = dict(path="Qwen/Qwen3-14B")
architecture = dict(
    _base_="qwen3_8b", num_hidden_layers=40, hidden_size=5120, intermediate_size=17408, num_attention_heads=40
)
