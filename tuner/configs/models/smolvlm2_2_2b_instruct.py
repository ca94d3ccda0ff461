"""SmolVLM2 2.2B, Hugging Face's small chat model that reads images."""

model = dict(path="HuggingFaceTB/SmolVLM2-2.2B-Instruct")
architecture = dict(
    _base_="smollm_1_7b",
    vocab_size=49280,
    tie_word_embeddings=False,
    max_position_embeddings=8192,
    vision_config=dict(
        model_type="smolvlm",
        num_hidden_layers=27,
        hidden_size=1152,
        intermediate_size=4304,
        num_attention_heads=16,
        patch_size=14,
        image_size=384,
        num_tokens=81,
    ),
)
