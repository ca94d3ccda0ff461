"""Gemma 2 2B, Google's base model, trained on text."""

model = dict(path="google/gemma-2-2b", chat_template="gemma")
architecture = dict(
    _base_="gemma2_9b",
    num_hidden_layers=26,
    hidden_size=2304,
    intermediate_size=9216,
    num_attention_heads=8,
    num_key_value_heads=4,
)
