"""Granite 4.0 H Small, IBM's hybrid chat model of 32B-A9B, with experts; planned from its config.json."""

model = dict(path="ibm-granite/granite-4.0-h-small")
