"""Olmo 3 32B Think, Ai2's open chat model that thinks first."""

model = dict(path="allenai/Olmo-3-32B-Think")
architecture = "olmo3_32b"
