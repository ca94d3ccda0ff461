"""Nemotron 3 Super 120B-A12B, NVIDIA's hybrid chat model with experts; planned from its config.json."""

model = dict(path="nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16")
