"""Granite 3.1 3B-A800M Instruct, IBM's chat model with 40 experts."""

model = dict(path="ibm-granite/granite-3.1-3b-a800m-instruct")
architecture = dict(_base_="granite_3_1_3b_a800m_base", vocab_size=49155)
