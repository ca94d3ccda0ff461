"""QwQ 32B, Alibaba's model that thinks before it answers, built on Qwen2.5."""

model = dict(path="Qwen/QwQ-32B")
architecture = dict(_base_="qwen2_5_32b", max_position_embeddings=40960)
