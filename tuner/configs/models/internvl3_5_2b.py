"""InternVL3.5 2B, in the form of transformers; it reads images; sizes from memory."""

model = dict(path="OpenGVLab/InternVL3_5-2B-HF")
architecture = dict(
    _base_="qwen3_1_7b",
    tie_word_embeddings=False,
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
