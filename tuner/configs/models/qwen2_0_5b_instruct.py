"""Qwen2 0.5B Instruct, Alibaba's chat model."""

model = dict(path="Qwen/Qwen2-0.5B-Instruct")
architecture = dict(
    model_type="qwen2",
    num_hidden_layers=24,
    hidden_size=896,
    intermediate_size=4864,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=151936,
    tie_word_embeddings=True,
    max_position_embeddings=32768,
)
