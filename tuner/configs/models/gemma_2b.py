"""Gemma 2B, Google's base model, trained on text."""

model = dict(path="google/gemma-2b", chat_template="gemma")
architecture = dict(
    _base_="gemma_7b",
    num_hidden_layers=18,
    hidden_size=2048,
    intermediate_size=16384,
    num_attention_heads=8,
    num_key_value_heads=1,
)
