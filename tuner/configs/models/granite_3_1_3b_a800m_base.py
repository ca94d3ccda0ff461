"""Granite 3.1 3B-A800M, IBM's base model with 40 experts."""

model = dict(path="ibm-granite/granite-3.1-3b-a800m-base", chat_template="vicuna")
architecture = dict(
    _base_="granite_3_1_1b_a400m_base",
    num_hidden_layers=32,
    hidden_size=1536,
    num_attention_heads=24,
    num_local_experts=40,
)
