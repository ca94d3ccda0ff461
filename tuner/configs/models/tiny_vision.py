"""A small LLaVA (CLIP tower and Llama) that the package makes itself, untrained, with no download."""

model = dict(path="package:tiny_vision", images=True)
architecture = dict(
    _base_="tiny",
    vision_config=dict(
        model_type="llava",
        num_hidden_layers=3,
        hidden_size=64,
        intermediate_size=192,
        num_attention_heads=4,
        patch_size=8,
        image_size=32,
        num_tokens=16,
    ),
)
