"""Gemma 1.1 2B Instruct, Google's chat model; it knows no system turns."""

model = dict(path="google/gemma-1.1-2b-it")
architecture = dict(
    model_type="gemma",
    num_hidden_layers=18,
    hidden_size=2048,
    intermediate_size=16384,
    num_attention_heads=8,
    num_key_value_heads=1,
    head_dim=256,
    vocab_size=256000,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)
