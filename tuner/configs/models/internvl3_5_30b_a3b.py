"""InternVL3.5 30B-A3B, in the form of transformers; it reads images; sizes from memory."""

model = dict(path="OpenGVLab/InternVL3_5-30B-A3B-HF")
architecture = dict(_base_="qwen3_30b_a3b", vision_config="internvl3_8b")
