"""LLaVA 1.5 13B, a CLIP tower and Vicuna 13B, which reads images."""

model = dict(path="llava-hf/llava-1.5-13b-hf")
architecture = dict(
    model_type="llama",
    num_hidden_layers=40,
    hidden_size=5120,
    intermediate_size=13824,
    num_attention_heads=40,
    num_key_value_heads=40,
    head_dim=128,
    vocab_size=32064,
    tie_word_embeddings=False,
    max_position_embeddings=4096,
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
