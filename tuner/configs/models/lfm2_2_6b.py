"""LFM2 2.6B, Liquid AI's hybrid chat model; planned from its config.json."""

model = dict(path="LiquidAI/LFM2-2.6B")
