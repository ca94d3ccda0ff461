"""Kimi K2.6 1T, Moonshot AI's chat model that reads images; 4-bit experts; planned from its config.json."""

model = dict(path="moonshotai/Kimi-K2.6")
