"""Falcon 3 1B Instruct, TII's chat model."""

model = dict(path="tiiuae/Falcon3-1B-Instruct")
architecture = dict(
    model_type="llama",
    num_hidden_layers=18,
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    vocab_size=131072,
    tie_word_embeddings=False,
    max_position_embeddings=8192,
)
