"""Granite 3.2 8B Instruct, IBM's chat model."""

model = dict(path="ibm-granite/granite-3.2-8b-instruct")
architecture = "granite_3_1_8b_instruct"
