"""Qwen2.5 3B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen2.5-3B")
architecture = dict(
    model_type="qwen2",
    num_hidden_layers=36,
    hidden_size=2048,
    intermediate_size=11008,
    num_attention_heads=16,
    num_key_value_heads=2,
    vocab_size=151936,
    tie_word_embeddings=True,
    max_position_embeddings=32768,
)
