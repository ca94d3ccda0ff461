"""Granite 4.0 H Micro, IBM's hybrid chat model of 3B, dense; planned from its config.json."""

model = dict(path="ibm-granite/granite-4.0-h-micro")
