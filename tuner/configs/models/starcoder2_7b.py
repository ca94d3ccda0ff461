"""StarCoder2 7B, BigCode's base model for code."""

model = dict(path="bigcode/starcoder2-7b", chat_template="vicuna")
architecture = dict(
    model_type="starcoder2",
    num_hidden_layers=32,
    hidden_size=4608,
    intermediate_size=18432,
    num_attention_heads=36,
    num_key_value_heads=4,
    vocab_size=49152,
    tie_word_embeddings=True,
    max_position_embeddings=16384,
)
