"""Gemma 1.1 7B Instruct, Google's chat model; it knows no system turns."""

model = dict(path="google/gemma-1.1-7b-it")
architecture = dict(
    model_type="gemma",
    num_hidden_layers=28,
    hidden_size=3072,
    intermediate_size=24576,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=256,
    vocab_size=256000,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)
