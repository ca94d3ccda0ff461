"""Apertus 8B Instruct, the Swiss AI Initiative's open chat model."""

model = dict(path="swiss-ai/Apertus-8B-Instruct-2509")
architecture = dict(
    model_type="apertus",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=21504,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=131072,
    tie_word_embeddings=False,
    max_position_embeddings=65536,
)
