"""BLOOM 560M, BigScience's base model of 46 languages."""

model = dict(path="bigscience/bloom-560m", chat_template="vicuna")
architecture = dict(_base_="bloom_1b7", hidden_size=1024)
