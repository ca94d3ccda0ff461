"""Mistral Nemo 12B Instruct, Mistral AI's and NVIDIA's chat model."""

model = dict(path="mistralai/Mistral-Nemo-Instruct-2407")
architecture = dict(
    model_type="mistral",
    num_hidden_layers=40,
    hidden_size=5120,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=131072,
    tie_word_embeddings=False,
    max_position_embeddings=131072,
)
