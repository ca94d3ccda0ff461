"""OLMo 2 7B Instruct, Ai2's open chat model."""

model = dict(path="allenai/OLMo-2-1124-7B-Instruct")
architecture = "olmo2_7b"
