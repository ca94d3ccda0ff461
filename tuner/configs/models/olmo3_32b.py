"""Olmo 3 32B, Ai2's open base model."""

model = dict(path="allenai/Olmo-3-1125-32B", chat_template="chatml")
architecture = dict(
    _base_="olmo3_7b",
    num_hidden_layers=64,
    hidden_size=5120,
    intermediate_size=27648,
    num_attention_heads=40,
    num_key_value_heads=8,
)
