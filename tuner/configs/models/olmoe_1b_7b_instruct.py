"""OLMoE 7B Instruct, Ai2's open chat model with 64 experts, 1B active."""

model = dict(path="allenai/OLMoE-1B-7B-0924-Instruct")
architecture = "olmoe_1b_7b"
