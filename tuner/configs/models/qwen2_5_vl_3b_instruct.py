"""Qwen2.5-VL 3B, Alibaba's chat model that reads images of any size."""

model = dict(path="Qwen/Qwen2.5-VL-3B-Instruct")
architecture = dict(_base_="qwen2_5_3b", max_position_embeddings=128000, vision_config="qwen2_5_vl_7b_instruct")
