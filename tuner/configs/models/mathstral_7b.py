"""Mathstral 7B, Mistral AI's chat model for mathematics."""

model = dict(path="mistralai/Mathstral-7B-v0.1")
architecture = dict(
    model_type="mistral",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32768,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
)
