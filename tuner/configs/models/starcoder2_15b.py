"""StarCoder2 15B, BigCode's base model for code."""

model = dict(path="bigcode/starcoder2-15b", chat_template="vicuna")
architecture = dict(
    _base_="starcoder2_7b",
    num_hidden_layers=40,
    hidden_size=6144,
    intermediate_size=24576,
    num_attention_heads=48,
    tie_word_embeddings=False,
)
