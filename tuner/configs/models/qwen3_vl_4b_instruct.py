"""Qwen3-VL 4B, Alibaba's chat model that reads images of any size; sizes from memory."""

model = dict(path="Qwen/Qwen3-VL-4B-Instruct")
architecture = dict(
    _base_="qwen3_4b",
    max_position_embeddings=262144,
    vision_config=dict(
        model_type="qwen3_vl",
        num_hidden_layers=24,
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=16,
        patch_size=16,
        merge_size=2,
    ),
)
