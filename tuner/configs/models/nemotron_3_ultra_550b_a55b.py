"""Nemotron 3 Ultra 550B-A55B, NVIDIA's hybrid chat model with experts; planned from its config.json."""

model = dict(path="nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16")
