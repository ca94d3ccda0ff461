"""Falcon 3 3B Instruct, TII's chat model."""

model = dict(path="tiiuae/Falcon3-3B-Instruct")
architecture = "falcon3_3b_base"
