"""OLMo 2 32B, Ai2's open base model."""

model = dict(path="allenai/OLMo-2-0325-32B", chat_template="zephyr")
architecture = dict(_base_="olmo2_13b", num_hidden_layers=64, intermediate_size=27648, num_key_value_heads=8)
