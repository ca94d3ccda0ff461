"""Phi-4 Mini Reasoning 3.8B, Microsoft's small chat model for mathematics that thinks first."""

model = dict(path="microsoft/Phi-4-mini-reasoning")
architecture = "phi4_mini_instruct"
