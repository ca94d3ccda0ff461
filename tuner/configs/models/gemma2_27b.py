"""Gemma 2 27B, Google's base model, trained on text."""

model = dict(path="google/gemma-2-27b", chat_template="gemma")
architecture = dict(
    _base_="gemma2_9b",
    num_hidden_layers=46,
    hidden_size=4608,
    intermediate_size=36864,
    num_attention_heads=32,
    num_key_value_heads=16,
    head_dim=128,
)
