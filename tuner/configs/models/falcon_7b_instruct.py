"""Falcon 7B Instruct, TII's chat model."""

model = dict(path="tiiuae/falcon-7b-instruct")
architecture = "falcon_7b"
