"""Falcon 3 10B Instruct, TII's chat model."""

model = dict(path="tiiuae/Falcon3-10B-Instruct")
architecture = "falcon3_10b_base"
