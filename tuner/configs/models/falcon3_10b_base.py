"""Falcon 3 10B, TII's base model."""

model = dict(path="tiiuae/Falcon3-10B-Base", chat_template="zephyr")
architecture = dict(
    model_type="llama",
    num_hidden_layers=40,
    hidden_size=3072,
    intermediate_size=23040,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=256,
    vocab_size=131072,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
)
