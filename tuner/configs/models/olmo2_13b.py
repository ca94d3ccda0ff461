"""OLMo 2 13B, Ai2's open base model."""

model = dict(path="allenai/OLMo-2-1124-13B", chat_template="zephyr")
architecture = dict(
    _base_="olmo2_7b",
    num_hidden_layers=40,
    hidden_size=5120,
    intermediate_size=13824,
    num_attention_heads=40,
    num_key_value_heads=40,
)
