"""Granite 3.1 1B-A400M Instruct, IBM's chat model with 32 experts."""

model = dict(path="ibm-granite/granite-3.1-1b-a400m-instruct")
architecture = dict(_base_="granite_3_1_1b_a400m_base", vocab_size=49155)
