"""Falcon 40B Instruct, TII's chat model."""

model = dict(path="tiiuae/falcon-40b-instruct")
architecture = dict(
    model_type="falcon",
    num_hidden_layers=60,
    hidden_size=8192,
    intermediate_size=32768,
    num_attention_heads=128,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=65024,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
    num_ln_in_parallel_attn=2,
)
