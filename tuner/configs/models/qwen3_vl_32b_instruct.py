"""Qwen3-VL 32B, Alibaba's chat model that reads images of any size; sizes from memory."""

model = dict(path="Qwen/Qwen3-VL-32B-Instruct")
architecture = dict(_base_="qwen3_32b", max_position_embeddings=262144, vision_config="qwen3_vl_8b_instruct")
