"""Mistral 7B Instruct v0.1, Mistral AI's first chat model."""

model = dict(path="mistralai/Mistral-7B-Instruct-v0.1")
architecture = dict(
    model_type="mistral",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32000,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
)
