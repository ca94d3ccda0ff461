"""Falcon 40B Instruct, TII's chat model."""

model = dict(path="tiiuae/falcon-40b-instruct")
architecture = "falcon_40b"
