"""Qwen2.5 1.5B Instruct, Alibaba's chat model."""

model = dict(path="Qwen/Qwen2.5-1.5B-Instruct")
architecture = dict(
    model_type="qwen2",
    num_hidden_layers=28,
    hidden_size=1536,
    intermediate_size=8960,
    num_attention_heads=12,
    num_key_value_heads=2,
    vocab_size=151936,
    tie_word_embeddings=True,
    max_position_embeddings=32768,
)
