"""Qwen2 72B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen2-72B", chat_template="chatml")
architecture = dict(
    model_type="qwen2",
    num_hidden_layers=80,
    hidden_size=8192,
    intermediate_size=29568,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=152064,
    tie_word_embeddings=False,
    max_position_embeddings=131072,
)
