"""Kimi Linear 48B-A3B Instruct, Moonshot AI's hybrid chat model with 256 experts, 3B active."""

model = dict(path="moonshotai/Kimi-Linear-48B-A3B-Instruct")
architecture = "kimi_linear_48b_a3b_base"
