"""Stable Code 3B, Stability AI's base model for code."""

model = dict(path="stabilityai/stable-code-3b", chat_template="vicuna")
architecture = dict(_base_="stablelm_3b_4e1t", max_position_embeddings=16384)
