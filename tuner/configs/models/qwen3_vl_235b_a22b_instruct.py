"""Qwen3-VL 235B-A22B, Alibaba's chat model that reads images, 22B active; sizes from memory."""

model = dict(path="Qwen/Qwen3-VL-235B-A22B-Instruct")
architecture = dict(_base_="qwen3_235b_a22b", max_position_embeddings=262144, vision_config="qwen3_vl_30b_a3b_instruct")
