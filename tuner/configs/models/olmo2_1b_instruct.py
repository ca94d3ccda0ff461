"""OLMo 2 1B Instruct, Ai2's open chat model."""

model = dict(path="allenai/OLMo-2-0425-1B-Instruct")
architecture = "olmo2_1b"
