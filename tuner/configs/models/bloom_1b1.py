"""BLOOM 1.1B, BigScience's base model of 46 languages."""

model = dict(path="bigscience/bloom-1b1", chat_template="vicuna")
architecture = dict(_base_="bloom_1b7", hidden_size=1536)
