"""Codestral 22B, Mistral AI's model for code."""

model = dict(path="mistralai/Codestral-22B-v0.1")
architecture = dict(
    model_type="mistral",
    num_hidden_layers=56,
    hidden_size=6144,
    intermediate_size=16384,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32768,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
)
