"""Olmo 3 7B Think, Ai2's open chat model that thinks first."""

model = dict(path="allenai/Olmo-3-7B-Think")
architecture = "olmo3_7b"
