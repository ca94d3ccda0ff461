"""Aya 23 35B, Cohere's larger chat model of 23 languages."""

model = dict(path="CohereLabs/aya-23-35B")
architecture = dict(
    model_type="cohere",
    num_hidden_layers=40,
    hidden_size=8192,
    intermediate_size=22528,
    num_attention_heads=64,
    num_key_value_heads=64,
    vocab_size=256000,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)
