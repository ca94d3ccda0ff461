"""Qwen1.5 0.5B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen1.5-0.5B", chat_template="chatml")
architecture = dict(
    model_type="qwen2",
    num_hidden_layers=24,
    hidden_size=1024,
    intermediate_size=2816,
    num_attention_heads=16,
    num_key_value_heads=16,
    vocab_size=151936,
    tie_word_embeddings=True,
    max_position_embeddings=32768,
)
