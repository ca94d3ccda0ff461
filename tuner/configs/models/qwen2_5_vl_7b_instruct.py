"""Qwen2.5-VL 7B, Alibaba's chat model that reads images of any size."""

model = dict(path="Qwen/Qwen2.5-VL-7B-Instruct")
architecture = dict(
    _base_="qwen2_7b",
    max_position_embeddings=128000,
    vision_config=dict(
        model_type="qwen2_5_vl",
        num_hidden_layers=32,
        hidden_size=1280,
        intermediate_size=3420,
        num_attention_heads=16,
        patch_size=14,
        merge_size=2,
    ),
)
