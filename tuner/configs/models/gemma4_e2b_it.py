"""Gemma 4 E2B Instruct, Google's chat model that also sees and hears; its text half."""

model = dict(path="google/gemma-4-E2B-it")
architecture = dict(
    _base_="gemma4_e4b_it",
    num_hidden_layers=35,
    hidden_size=1536,
    intermediate_size=6144,
    num_key_value_heads=1,
    num_kv_shared_layers=20,
    use_double_wide_mlp=True,
    layer_types=[
        "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
        "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
        "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
        "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
        "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
        "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
        "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
    ],
)  # fmt: skip
