"""Qwen3.5 2B, Alibaba's chat model with linear attention; its text half."""

model = dict(path="Qwen/Qwen3.5-2B")
architecture = dict(
    _base_="qwen3_5_9b",
    num_hidden_layers=24,
    hidden_size=2048,
    intermediate_size=6144,
    num_attention_heads=8,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    linear_num_value_heads=16,
)
