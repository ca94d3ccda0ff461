"""Qwen2.5 32B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen2.5-32B")
architecture = dict(
    model_type="qwen2",
    num_hidden_layers=64,
    hidden_size=5120,
    intermediate_size=27648,
    num_attention_heads=40,
    num_key_value_heads=8,
    vocab_size=152064,
    tie_word_embeddings=False,
    max_position_embeddings=131072,
)
