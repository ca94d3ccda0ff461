"""Qwen1.5 72B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen1.5-72B", chat_template="chatml")
architecture = dict(_base_="qwen2_72b", intermediate_size=24576, num_key_value_heads=64, max_position_embeddings=32768)
