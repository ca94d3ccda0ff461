"""Qwen2.5 32B Instruct, Alibaba's chat model."""

model = dict(path="Qwen/Qwen2.5-32B-Instruct")
architecture = dict(
    model_type="qwen2",
    num_hidden_layers=64,
    hidden_size=5120,
    intermediate_size=27648,
    num_attention_heads=40,
    num_key_value_heads=8,
    vocab_size=152064,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
)
