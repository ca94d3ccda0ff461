"""Qwen1.5 4B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen1.5-4B", chat_template="chatml")
architecture = dict(
    model_type="qwen2",
    num_hidden_layers=40,
    hidden_size=2560,
    intermediate_size=6912,
    num_attention_heads=20,
    num_key_value_heads=20,
    vocab_size=151936,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
)
