"""LLaVA 1.5 13B, a CLIP tower and Vicuna 13B, which reads images."""

model = dict(path="llava-hf/llava-1.5-13b-hf")
architecture = dict(_base_="llama2_13b", vocab_size=32064, vision_config="llava_1_5_7b")
