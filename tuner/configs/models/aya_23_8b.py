"""Aya 23 8B, Cohere's chat model of 23 languages."""

model = dict(path="CohereLabs/aya-23-8B")
architecture = dict(
    model_type="cohere",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=256000,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)
