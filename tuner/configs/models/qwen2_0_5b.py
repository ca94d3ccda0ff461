"""Qwen2 0.5B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen2-0.5B", chat_template="chatml")
architecture = dict(
    model_type="qwen2",
    num_hidden_layers=24,
    hidden_size=896,
    intermediate_size=4864,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=151936,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
)
