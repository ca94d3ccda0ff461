"""Apertus 8B, the Swiss AI Initiative's open base model."""

model = dict(path="swiss-ai/Apertus-8B-2509", chat_template="vicuna")
architecture = dict(
    model_type="apertus",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=21504,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=131072,
    tie_word_embeddings=False,
    max_position_embeddings=65536,
)
