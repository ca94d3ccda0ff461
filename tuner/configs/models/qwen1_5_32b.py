"""Qwen1.5 32B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen1.5-32B", chat_template="chatml")
architecture = dict(_base_="qwen1_5_14b", num_hidden_layers=64, intermediate_size=27392, num_key_value_heads=8)
