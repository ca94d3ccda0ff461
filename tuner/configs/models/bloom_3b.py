"""BLOOM 3B, BigScience's base model of 46 languages."""

model = dict(path="bigscience/bloom-3b", chat_template="vicuna")
architecture = dict(_base_="bloom_7b1", hidden_size=2560)
