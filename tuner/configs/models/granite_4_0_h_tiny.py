"""Granite 4.0 H Tiny, IBM's hybrid chat model of 7B-A1B, with experts; planned from its config.json."""

model = dict(path="ibm-granite/granite-4.0-h-tiny")
