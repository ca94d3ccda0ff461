"""Gemma 3 12B, Google's base model that also sees; its text half."""

model = dict(path="google/gemma-3-12b-pt", chat_template="gemma")
architecture = dict(
    _base_="gemma3_4b_pt",
    num_hidden_layers=48,
    hidden_size=3840,
    intermediate_size=15360,
    num_attention_heads=16,
    num_key_value_heads=8,
)
