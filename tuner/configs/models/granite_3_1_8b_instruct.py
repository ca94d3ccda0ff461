"""Granite 3.1 8B Instruct, IBM's chat model."""

model = dict(path="ibm-granite/granite-3.1-8b-instruct")
architecture = dict(_base_="granite_3_1_8b_base", vocab_size=49155)
