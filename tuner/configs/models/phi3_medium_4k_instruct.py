"""Phi-3 Medium 14B Instruct, Microsoft's chat model with a context of 4 thousand tokens."""

model = dict(path="microsoft/Phi-3-medium-4k-instruct")
architecture = dict(
    _base_="phi3_mini_4k_instruct",
    num_hidden_layers=40,
    hidden_size=5120,
    intermediate_size=17920,
    num_attention_heads=40,
    num_key_value_heads=10,
)
