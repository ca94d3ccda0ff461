"""Llama 3.1 405B, Meta's base model with a context of 128 thousand tokens."""

model = dict(path="meta-llama/Llama-3.1-405B", chat_template="llama3_1")
architecture = dict(
    _base_="llama3_1_70b", num_hidden_layers=126, hidden_size=16384, intermediate_size=53248, num_attention_heads=128
)
