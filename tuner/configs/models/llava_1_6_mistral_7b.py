"""LLaVA 1.6 7B, a CLIP tower and Mistral 7B Instruct v0.2, which reads images in tiles."""

model = dict(path="llava-hf/llava-v1.6-mistral-7b-hf")
architecture = dict(
    model_type="mistral",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32064,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
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
