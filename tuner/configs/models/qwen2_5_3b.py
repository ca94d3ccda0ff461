"""Qwen2.5 3B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen2.5-3B")
architecture = dict(
    _base_="qwen1_5_0_5b", num_hidden_layers=36, hidden_size=2048, intermediate_size=11008, num_key_value_heads=2
)
