"""Llama 3 8B, Meta's base model with a context of 8 thousand tokens."""

model = dict(path="meta-llama/Meta-Llama-3-8B", chat_template="llama3")
architecture = dict(
    model_type="llama",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    tie_word_embeddings=False,
    max_position_embeddings=8192,
)
