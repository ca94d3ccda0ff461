"""Gemma 2 2B, Google's base model, trained on text."""

model = dict(path="google/gemma-2-2b", chat_template="gemma")
architecture = dict(
    model_type="gemma2",
    num_hidden_layers=26,
    hidden_size=2304,
    intermediate_size=9216,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    vocab_size=256000,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)
