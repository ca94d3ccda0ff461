"""InternVL3.5 8B, in the form of transformers; it reads images; sizes from memory."""

model = dict(path="OpenGVLab/InternVL3_5-8B-HF")
architecture = dict(_base_="qwen3_8b", vision_config="internvl3_8b")
