"""Llama 13B, Meta's first base model, trained on text."""

model = dict(path="huggyllama/llama-13b", chat_template="llama2")
architecture = dict(
    _base_="llama_7b",
    num_hidden_layers=40,
    hidden_size=5120,
    intermediate_size=13824,
    num_attention_heads=40,
    num_key_value_heads=40,
)
