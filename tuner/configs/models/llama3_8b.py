"""Llama 3 8B, Meta's base model with a context of 8 thousand tokens."""

model = dict(path="meta-llama/Meta-Llama-3-8B", chat_template="llama3")
architecture = dict(
    _base_="llama3_70b", num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32
)
