"""BLOOM 7.1B, BigScience's base model of 46 languages."""

model = dict(path="bigscience/bloom-7b1", chat_template="vicuna")
architecture = dict(_base_="bloom_1b7", num_hidden_layers=30, hidden_size=4096, num_attention_heads=32)
