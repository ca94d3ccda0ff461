"""Mistral Small 22B Instruct 2409, Mistral AI's chat model."""

model = dict(path="mistralai/Mistral-Small-Instruct-2409")
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
