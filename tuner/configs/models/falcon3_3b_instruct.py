"""Falcon 3 3B Instruct, TII's chat model."""

model = dict(path="tiiuae/Falcon3-3B-Instruct")
architecture = dict(
    model_type="llama",
    num_hidden_layers=22,
    hidden_size=3072,
    intermediate_size=9216,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=256,
    vocab_size=131072,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
)
