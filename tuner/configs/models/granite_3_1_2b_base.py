"""Granite 3.1 2B, IBM's base model."""

model = dict(path="ibm-granite/granite-3.1-2b-base", chat_template="vicuna")
architecture = dict(_base_="granite_3_1_8b_base", hidden_size=2048, intermediate_size=8192)
