"""StarCoder2 15B, BigCode's base model for code."""

model = dict(path="bigcode/starcoder2-15b", chat_template="vicuna")
architecture = dict(
    model_type="starcoder2",
    num_hidden_layers=40,
    hidden_size=6144,
    intermediate_size=24576,
    num_attention_heads=48,
    num_key_value_heads=4,
    vocab_size=49152,
    tie_word_embeddings=False,
    max_position_embeddings=16384,
)
