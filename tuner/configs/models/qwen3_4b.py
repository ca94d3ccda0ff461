"""Qwen3 4B, Alibaba's chat model that can think before it answers."""

model = dict(path="Qwen/Qwen3-4B")
architecture = dict(_base_="qwen3_8b", hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True)
