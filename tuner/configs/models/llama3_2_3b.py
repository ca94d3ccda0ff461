"""Llama 3.2 3B, Meta's small base model."""

model = dict(path="meta-llama/Llama-3.2-3B", chat_template="llama3_1")
architecture = dict(
    model_type="llama",
    num_hidden_layers=28,
    hidden_size=3072,
    intermediate_size=8192,
    num_attention_heads=24,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
)
