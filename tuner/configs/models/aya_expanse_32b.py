"""Aya Expanse 32B, Cohere's larger chat model of 23 languages."""

model = dict(path="CohereLabs/aya-expanse-32b")
architecture = "command_r_08_2024"
