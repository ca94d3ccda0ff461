"""Qwen1.5 1.8B, Alibaba's base model, trained on text."""

model = dict(path="Qwen/Qwen1.5-1.8B", chat_template="chatml")
architecture = dict(_base_="qwen1_5_0_5b", hidden_size=2048, intermediate_size=5504, tie_word_embeddings=False)
