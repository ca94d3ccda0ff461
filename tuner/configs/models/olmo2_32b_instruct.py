"""OLMo 2 32B Instruct, Ai2's open chat model."""

model = dict(path="allenai/OLMo-2-0325-32B-Instruct")
architecture = "olmo2_32b"
