"""LLaVA 1.5 13B, a CLIP tower and Vicuna 13B, which reads images."""

model = dict(path="llava-hf/llava-1.5-13b-hf")
architecture = dict(
    _base_="llava_1_5_7b",
    num_hidden_layers=40,
    hidden_size=5120,
    intermediate_size=13824,
    num_attention_heads=40,
    num_key_value_heads=40,
)
