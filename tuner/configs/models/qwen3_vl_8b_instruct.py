"""Qwen3-VL 8B, Alibaba's chat model that reads images of any size."""

model = dict(path="Qwen/Qwen3-VL-8B-Instruct")
architecture = dict(
    model_type="qwen3",
    num_hidden_layers=36,
    hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    tie_word_embeddings=False,
    max_position_embeddings=262144,
    vision_config=dict(
        model_type="qwen3_vl",
        num_hidden_layers=27,
        hidden_size=1152,
        intermediate_size=4304,
        num_attention_heads=16,
        patch_size=16,
        merge_size=2,
    ),
)
