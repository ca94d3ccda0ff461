"""InternVL3 8B in the form of transformers, Shanghai AI Lab's chat model that reads images."""

model = dict(path="OpenGVLab/InternVL3-8B-hf")
architecture = dict(
    model_type="qwen2",
    num_hidden_layers=28,
    hidden_size=3584,
    intermediate_size=18944,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=151674,
    tie_word_embeddings=False,
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
