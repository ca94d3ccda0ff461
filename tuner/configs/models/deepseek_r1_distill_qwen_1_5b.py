"""DeepSeek-R1 Distill Qwen 1.5B, Qwen2.5 Math taught to think by DeepSeek-R1."""

model = dict(path="deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B")
architecture = dict(_base_="qwen2_1_5b", tie_word_embeddings=False)
