"""Gemma 3 4B Instruct with its vision tower, Google's chat model that reads images."""

model = dict(path="google/gemma-3-4b-it")
architecture = dict(
    model_type="gemma3_text",
    num_hidden_layers=34,
    hidden_size=2560,
    intermediate_size=10240,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    vocab_size=262208,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
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
