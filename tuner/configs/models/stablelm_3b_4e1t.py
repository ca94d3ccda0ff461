"""StableLM 3B 4E1T, Stability AI's base model."""

model = dict(path="stabilityai/stablelm-3b-4e1t", chat_template="zephyr")
architecture = dict(
    model_type="stablelm",
    num_hidden_layers=32,
    hidden_size=2560,
    intermediate_size=6912,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=50304,
    tie_word_embeddings=False,
    max_position_embeddings=4096,
)
