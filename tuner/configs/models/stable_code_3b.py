"""Stable Code 3B, Stability AI's base model for code."""

model = dict(path="stabilityai/stable-code-3b", chat_template="vicuna")
architecture = dict(
    model_type="stablelm",
    num_hidden_layers=32,
    hidden_size=2560,
    intermediate_size=6912,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=50304,
    tie_word_embeddings=False,
    max_position_embeddings=16384,
)
