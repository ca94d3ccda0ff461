"""LFM2 350M, Liquid AI's hybrid chat model; planned from its config.json."""

model = dict(path="LiquidAI/LFM2-350M")
