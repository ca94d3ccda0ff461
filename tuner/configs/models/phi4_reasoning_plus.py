"""Phi-4 Reasoning Plus 14B, Microsoft's chat model that thinks longer."""

model = dict(path="microsoft/Phi-4-reasoning-plus")
architecture = "phi4_reasoning"
