"""InternVL3.5 241B-A28B, in the form of transformers; it reads images; planned from its config.json."""

model = dict(path="OpenGVLab/InternVL3_5-241B-A28B-HF")
