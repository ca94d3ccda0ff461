"""Qwen3 1.7B Base, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen3-1.7B-Base")
architecture = dict(
    model_type="qwen3",
    num_hidden_layers=28,
    hidden_size=2048,
    intermediate_size=6144,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    tie_word_embeddings=True,
    max_position_embeddings=32768,
)
