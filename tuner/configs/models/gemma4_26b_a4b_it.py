"""Gemma 4 26B-A4B Instruct, Google's chat model that also sees, with 128 experts; its text half."""

model = dict(path="google/gemma-4-26B-A4B-it")
architecture = dict(
    _base_="gemma4_31b_it",
    num_hidden_layers=30,
    hidden_size=2816,
    intermediate_size=2112,
    num_attention_heads=16,
    num_key_value_heads=8,
    num_experts=128,
    moe_intermediate_size=704,
    num_global_key_value_heads=2,
    top_k_experts=8,
    enable_moe_block=True,
)
