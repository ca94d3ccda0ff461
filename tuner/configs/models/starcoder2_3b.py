"""StarCoder2 3B, BigCode's base model for code."""

model = dict(path="bigcode/starcoder2-3b", chat_template="vicuna")
architecture = dict(
    _base_="starcoder2_7b",
    num_hidden_layers=30,
    hidden_size=3072,
    intermediate_size=12288,
    num_attention_heads=24,
    num_key_value_heads=2,
)
