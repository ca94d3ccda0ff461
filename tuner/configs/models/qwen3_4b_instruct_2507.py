"""Qwen3 4B Instruct 2507, Alibaba's chat model that answers without thinking first."""

model = dict(path="Qwen/Qwen3-4B-Instruct-2507")
architecture = dict(
    model_type="qwen3",
    num_hidden_layers=36,
    hidden_size=2560,
    intermediate_size=9728,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    tie_word_embeddings=True,
    max_position_embeddings=262144,
)
