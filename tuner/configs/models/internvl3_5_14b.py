"""InternVL3.5 14B, in the form of transformers; it reads images; sizes from memory."""

model = dict(path="OpenGVLab/InternVL3_5-14B-HF")
architecture = dict(_base_="qwen3_14b", vision_config="internvl3_8b")
