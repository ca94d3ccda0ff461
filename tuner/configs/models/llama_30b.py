"""Llama 30B, Meta's first base model, trained on text."""

model = dict(path="huggyllama/llama-30b", chat_template="llama2")
architecture = dict(
    _base_="llama_7b",
    num_hidden_layers=60,
    hidden_size=6656,
    intermediate_size=17920,
    num_attention_heads=52,
    num_key_value_heads=52,
)
