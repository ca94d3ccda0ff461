"""InternVL3 8B in the form of transformers, Shanghai AI Lab's chat model that reads images."""

model = dict(path="OpenGVLab/InternVL3-8B-hf")
architecture = dict(
    _base_="qwen2_7b",
    vocab_size=151674,
    max_position_embeddings=32768,
    vision_config=dict(
        model_type="internvl",
        num_hidden_layers=24,
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=16,
        patch_size=14,
        image_size=448,
        num_tokens=256,
    ),
)
