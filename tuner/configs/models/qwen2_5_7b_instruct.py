"""Qwen2.5 7B Instruct, Alibaba's chat model."""

model = dict(path="Qwen/Qwen2.5-7B-Instruct")
architecture = dict(
    model_type="qwen2",
    num_hidden_layers=28,
    hidden_size=3584,
    intermediate_size=18944,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
)
