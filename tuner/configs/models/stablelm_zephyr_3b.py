"""StableLM Zephyr 3B, Stability AI's chat model."""

model = dict(path="stabilityai/stablelm-zephyr-3b")
architecture = dict(
    model_type="stablelm",
    num_hidden_layers=32,
    hidden_size=2560,
    intermediate_size=6912,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=80,
    vocab_size=50304,
    tie_word_embeddings=False,
    max_position_embeddings=4096,
)
