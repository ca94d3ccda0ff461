"""Mistral Small 3 24B Instruct, Mistral AI's chat model."""

model = dict(path="mistralai/Mistral-Small-24B-Instruct-2501")
architecture = dict(
    model_type="mistral",
    num_hidden_layers=40,
    hidden_size=5120,
    intermediate_size=32768,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=131072,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
)
