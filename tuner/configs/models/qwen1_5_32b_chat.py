"""Qwen1.5 32B Chat, Alibaba's chat model."""

model = dict(path="Qwen/Qwen1.5-32B-Chat")
architecture = dict(
    model_type="qwen2",
    num_hidden_layers=64,
    hidden_size=5120,
    intermediate_size=27392,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=152064,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
)
