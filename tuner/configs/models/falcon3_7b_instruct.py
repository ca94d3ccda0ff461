"""Falcon 3 7B Instruct, TII's chat model."""

model = dict(path="tiiuae/Falcon3-7B-Instruct")
architecture = "falcon3_7b_base"
