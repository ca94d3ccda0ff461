"""Falcon 3 10B, TII's base model."""

model = dict(path="tiiuae/Falcon3-10B-Base", chat_template="zephyr")
architecture = dict(_base_="falcon3_7b_base", num_hidden_layers=40)
