"""Qwen3.5 27B, Alibaba's chat model with linear attention; its text half."""

model = dict(path="Qwen/Qwen3.5-27B")
architecture = dict(
    _base_="qwen3_5_9b",
    num_hidden_layers=64,
    hidden_size=5120,
    intermediate_size=17408,
    num_attention_heads=24,
    linear_num_value_heads=48,
)
