"""Qwen1.5 14B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen1.5-14B", chat_template="chatml")
architecture = dict(
    model_type="qwen2",
    num_hidden_layers=40,
    hidden_size=5120,
    intermediate_size=13696,
    num_attention_heads=40,
    num_key_value_heads=40,
    vocab_size=152064,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
)
