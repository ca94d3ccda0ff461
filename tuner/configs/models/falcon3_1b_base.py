"""Falcon 3 1B, TII's base model."""

model = dict(path="tiiuae/Falcon3-1B-Base", chat_template="zephyr")
architecture = dict(
    _base_="falcon3_7b_base",
    num_hidden_layers=18,
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=8,
    max_position_embeddings=8192,
)
