"""Llama 65B, Meta's first base model, trained on text."""

model = dict(path="huggyllama/llama-65b", chat_template="llama2")
architecture = dict(
    model_type="llama",
    num_hidden_layers=80,
    hidden_size=8192,
    intermediate_size=22016,
    num_attention_heads=64,
    num_key_value_heads=64,
    head_dim=128,
    vocab_size=32000,
    tie_word_embeddings=False,
    max_position_embeddings=2048,
)
