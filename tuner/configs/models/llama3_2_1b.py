"""Llama 3.2 1B, Meta's smallest base model."""

model = dict(path="meta-llama/Llama-3.2-1B", chat_template="llama3_1")
architecture = dict(
    model_type="llama",
    num_hidden_layers=16,
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=128256,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
)
