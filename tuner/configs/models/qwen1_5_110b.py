"""Qwen1.5 110B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen1.5-110B", chat_template="chatml")
architecture = dict(_base_="qwen1_5_72b", intermediate_size=49152, num_key_value_heads=8)
