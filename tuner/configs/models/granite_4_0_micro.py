"""Granite 4.0 Micro, IBM's chat model of 3B, dense, with attention alone; planned from its config.json."""

model = dict(path="ibm-granite/granite-4.0-micro")
