"""Aya Expanse 8B, Cohere's chat model of 23 languages."""

model = dict(path="CohereLabs/aya-expanse-8b")
architecture = "aya_23_8b"
