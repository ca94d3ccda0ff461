"""Phi-3.5 Mini 3.8B Instruct, Microsoft's chat model."""

model = dict(path="microsoft/Phi-3.5-mini-instruct")
architecture = "phi3_mini_128k_instruct"
