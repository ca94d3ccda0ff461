"""Gemma 3 27B, Google's base model that also sees; its text half."""

model = dict(path="google/gemma-3-27b-pt", chat_template="gemma")
architecture = dict(
    _base_="gemma3_4b_pt",
    num_hidden_layers=62,
    hidden_size=5376,
    intermediate_size=21504,
    num_attention_heads=32,
    num_key_value_heads=16,
    head_dim=128,
)
