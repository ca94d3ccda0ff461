"""Falcon 3 3B, TII's base model."""

model = dict(path="tiiuae/Falcon3-3B-Base", chat_template="zephyr")
architecture = dict(_base_="falcon3_7b_base", num_hidden_layers=22, intermediate_size=9216)
