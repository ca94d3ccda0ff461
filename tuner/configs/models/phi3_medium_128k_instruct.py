"""Phi-3 Medium 14B Instruct, Microsoft's chat model with a context of 128 thousand tokens."""

model = dict(path="microsoft/Phi-3-medium-128k-instruct")
architecture = dict(_base_="phi3_medium_4k_instruct", max_position_embeddings=131072)
