"""Granite 3.2 2B Instruct, IBM's chat model."""

model = dict(path="ibm-granite/granite-3.2-2b-instruct")
architecture = "granite_3_1_2b_instruct"
