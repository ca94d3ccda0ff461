"""QwQ 32B, Alibaba's model that thinks before it answers, built on Qwen2.5."""

model = dict(path="Qwen/QwQ-32B")
architecture = dict(
    model_type="qwen2",
    num_hidden_layers=64,
    hidden_size=5120,
    intermediate_size=27648,
    num_attention_heads=40,
    num_key_value_heads=8,
    vocab_size=152064,
    tie_word_embeddings=False,
    max_position_embeddings=40960,
)
