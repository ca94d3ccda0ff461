"""Qwen3 8B Base, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen3-8B-Base")
architecture = dict(
    model_type="qwen3",
    num_hidden_layers=36,
    hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
)
