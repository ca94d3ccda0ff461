"""InternVL3.5 4B, in the form of transformers; it reads images; sizes from memory."""

model = dict(path="OpenGVLab/InternVL3_5-4B-HF")
architecture = dict(_base_="qwen3_4b", tie_word_embeddings=False, vision_config="internvl3_8b")
