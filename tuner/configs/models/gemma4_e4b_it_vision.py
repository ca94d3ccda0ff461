"""Gemma 4 E4B Instruct with its vision tower, Google's chat model that reads images; what it hears is not trained."""

model = dict(path="google/gemma-4-E4B-it")
architecture = dict(
    _base_="gemma4_e4b_it",
    vision_config=dict(
        model_type="gemma4",
        num_hidden_layers=16,
        hidden_size=768,
        intermediate_size=3072,
        num_attention_heads=12,
        patch_size=16,
        merge_size=3,
        num_tokens=280,
        num_parameters_of_sound=308_756_768,
    ),
)
