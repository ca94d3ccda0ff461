"""OLMo 7B Instruct, Ai2's open chat model."""

model = dict(path="allenai/OLMo-7B-Instruct-hf")
architecture = "olmo_7b_hf"
