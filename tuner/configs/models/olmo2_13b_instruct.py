"""OLMo 2 13B Instruct, Ai2's open chat model."""

model = dict(path="allenai/OLMo-2-1124-13B-Instruct")
architecture = "olmo2_13b"
