"""Qwen3-VL 32B, Alibaba's chat model that reads images of any size; sizes from memory."""

model = dict(path="Qwen/Qwen3-VL-32B-Instruct")
architecture = dict(
    _base_="qwen3_32b",
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
