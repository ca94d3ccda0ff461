"""Granite 3.3 2B Instruct, IBM's chat model that can think first."""

model = dict(path="ibm-granite/granite-3.3-2b-instruct")
architecture = dict(_base_="granite_3_1_2b_base", vocab_size=49159)
