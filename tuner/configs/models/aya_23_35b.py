"""Aya 23 35B, Cohere's larger chat model of 23 languages."""

model = dict(path="CohereLabs/aya-23-35B")
architecture = dict(_base_="command_r", max_position_embeddings=8192)
