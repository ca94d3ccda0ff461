"""Granite 3.3 8B Instruct, IBM's chat model that can think first."""

model = dict(path="ibm-granite/granite-3.3-8b-instruct")
architecture = dict(_base_="granite_3_1_8b_base", vocab_size=49159)
