"""Olmo 3 7B Instruct, Ai2's open chat model."""

model = dict(path="allenai/Olmo-3-7B-Instruct")
architecture = "olmo3_7b"
