"""Llama 3 70B Instruct, Meta's chat model with a context of 8 thousand tokens."""

model = dict(path="meta-llama/Meta-Llama-3-70B-Instruct")
architecture = dict(
    model_type="llama",
    num_hidden_layers=80,
    hidden_size=8192,
    intermediate_size=28672,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    tie_word_embeddings=False,
    max_position_embeddings=8192,
)
