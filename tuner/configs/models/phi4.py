"""Phi-4 14B, Microsoft's chat model."""

model = dict(path="microsoft/phi-4")
architecture = dict(_base_="phi3_medium_4k_instruct", vocab_size=100352, max_position_embeddings=16384)
