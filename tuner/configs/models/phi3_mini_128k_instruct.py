"""Phi-3 Mini 3.8B Instruct, Microsoft's chat model with a context of 128 thousand tokens."""

model = dict(path="microsoft/Phi-3-mini-128k-instruct")
architecture = dict(_base_="phi3_mini_4k_instruct", max_position_embeddings=131072)
