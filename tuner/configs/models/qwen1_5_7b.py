"""Qwen1.5 7B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen1.5-7B", chat_template="chatml")
architecture = dict(
    model_type="qwen2",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=11008,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=151936,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
)
