"""Gemma 3 1B, Google's base model, trained on text."""

model = dict(path="google/gemma-3-1b-pt", chat_template="gemma")
architecture = dict(
    model_type="gemma3_text",
    num_hidden_layers=26,
    hidden_size=1152,
    intermediate_size=6912,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    vocab_size=262144,
    tie_word_embeddings=True,
    max_position_embeddings=32768,
)
