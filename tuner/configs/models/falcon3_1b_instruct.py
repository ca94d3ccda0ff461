"""Falcon 3 1B Instruct, TII's chat model."""

model = dict(path="tiiuae/Falcon3-1B-Instruct")
architecture = "falcon3_1b_base"
