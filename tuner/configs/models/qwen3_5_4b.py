"""Qwen3.5 4B, Alibaba's chat model with linear attention; its text half."""

model = dict(path="Qwen/Qwen3.5-4B")
architecture = dict(_base_="qwen3_5_9b", hidden_size=2560, intermediate_size=9216, tie_word_embeddings=True)
