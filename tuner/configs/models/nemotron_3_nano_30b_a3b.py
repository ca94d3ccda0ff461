"""Nemotron 3 Nano 30B-A3B, NVIDIA's hybrid chat model with experts; planned from its config.json."""

model = dict(path="nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
