"""Gemma 3 4B Instruct with its vision tower, Google's chat model that reads images."""

model = dict(path="google/gemma-3-4b-it")
architecture = dict(
    _base_="gemma3_4b_pt",
    vision_config=dict(
        model_type="gemma3",
        num_hidden_layers=27,
        hidden_size=1152,
        intermediate_size=4304,
        num_attention_heads=16,
        patch_size=14,
        image_size=896,
        num_tokens=256,
    ),
)
