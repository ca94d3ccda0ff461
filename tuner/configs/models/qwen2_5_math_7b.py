"""Qwen2.5 Math 7B, Alibaba's base model, trained on mathematics."""

model = dict(path="Qwen/Qwen2.5-Math-7B")
architecture = dict(
    model_type="qwen2",
    num_hidden_layers=28,
    hidden_size=3584,
    intermediate_size=18944,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
    tie_word_embeddings=False,
    max_position_embeddings=4096,
)
