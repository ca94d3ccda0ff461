"""Qwen3 14B Base, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen3-14B-Base")
architecture = dict(
    model_type="qwen3",
    num_hidden_layers=40,
    hidden_size=5120,
    intermediate_size=17408,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
)
