"""LLaVA 1.6 7B, a CLIP tower and Mistral 7B Instruct v0.2, which reads images in tiles."""

model = dict(path="llava-hf/llava-v1.6-mistral-7b-hf")
architecture = dict(
    _base_="mistral_7b",
    vocab_size=32064,
    vision_config=dict(
        model_type="llava_next",
        num_hidden_layers=24,
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=16,
        patch_size=14,
        image_size=336,
        num_tokens=576,
    ),
)
