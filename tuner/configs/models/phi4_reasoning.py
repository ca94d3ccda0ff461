"""Phi-4 Reasoning 14B, Microsoft's chat model that thinks first."""

model = dict(path="microsoft/Phi-4-reasoning")
architecture = dict(_base_="phi4", max_position_embeddings=32768)
