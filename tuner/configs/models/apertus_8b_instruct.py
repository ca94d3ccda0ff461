"""Apertus 8B Instruct, the Swiss AI Initiative's open chat model."""

model = dict(path="swiss-ai/Apertus-8B-Instruct-2509")
architecture = "apertus_8b"
