"""StableLM 2 1.6B, Stability AI's base model."""

model = dict(path="stabilityai/stablelm-2-1_6b", chat_template="zephyr")
architecture = dict(
    model_type="stablelm",
    num_hidden_layers=24,
    hidden_size=2048,
    intermediate_size=5632,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=100352,
    tie_word_embeddings=False,
    max_position_embeddings=4096,
    use_qkv_bias=True,
)
