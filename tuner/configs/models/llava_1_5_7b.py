"""LLaVA 1.5 7B, a CLIP tower and Vicuna 7B, which reads images."""

model = dict(path="llava-hf/llava-1.5-7b-hf")
architecture = dict(
    _base_="llama2_7b",
    vocab_size=32064,
    vision_config=dict(
        model_type="llava",
        num_hidden_layers=24,
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=16,
        patch_size=14,
        image_size=336,
        num_tokens=576,
    ),
)
