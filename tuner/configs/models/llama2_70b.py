"""Llama 2 70B, Meta's base model, trained on text."""

model = dict(path="meta-llama/Llama-2-70b-hf", chat_template="llama2")
architecture = dict(
    _base_="llama2_7b",
    num_hidden_layers=80,
    hidden_size=8192,
    intermediate_size=28672,
    num_attention_heads=64,
    num_key_value_heads=8,
)
