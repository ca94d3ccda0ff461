"""OLMo 2 1B, Ai2's open base model."""

model = dict(path="allenai/OLMo-2-0425-1B", chat_template="zephyr")
architecture = dict(
    _base_="olmo2_7b",
    num_hidden_layers=16,
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=16,
    num_key_value_heads=16,
)
