"""Granite 3.1 2B Instruct, IBM's chat model."""

model = dict(path="ibm-granite/granite-3.1-2b-instruct")
architecture = dict(_base_="granite_3_1_2b_base", vocab_size=49155)
