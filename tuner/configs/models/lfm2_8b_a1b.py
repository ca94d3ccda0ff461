"""LFM2 8B-A1B, Liquid AI's hybrid chat model with experts; planned from its config.json."""

model = dict(path="LiquidAI/LFM2-8B-A1B")
