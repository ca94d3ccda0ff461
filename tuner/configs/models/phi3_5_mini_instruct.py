"""Phi-3.5 Mini 3.8B Instruct, Microsoft's chat model."""

model = dict(path="microsoft/Phi-3.5-mini-instruct")
architecture = dict(
    model_type="phi3",
    num_hidden_layers=32,
    hidden_size=3072,
    intermediate_size=8192,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=96,
    vocab_size=32064,
    tie_word_embeddings=False,
    max_position_embeddings=131072,
)
