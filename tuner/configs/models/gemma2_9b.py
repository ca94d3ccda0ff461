"""Gemma 2 9B, Google's base model, trained on text."""

model = dict(path="google/gemma-2-9b", chat_template="gemma")
architecture = dict(
    model_type="gemma2",
    num_hidden_layers=42,
    hidden_size=3584,
    intermediate_size=14336,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=256,
    vocab_size=256000,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)
