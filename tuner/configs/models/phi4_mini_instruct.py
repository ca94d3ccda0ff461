"""Phi-4 Mini 3.8B Instruct, Microsoft's small chat model."""

model = dict(path="microsoft/Phi-4-mini-instruct")
architecture = dict(
    model_type="phi3",
    num_hidden_layers=32,
    hidden_size=3072,
    intermediate_size=8192,
    num_attention_heads=24,
    num_key_value_heads=8,
    vocab_size=200064,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
)
