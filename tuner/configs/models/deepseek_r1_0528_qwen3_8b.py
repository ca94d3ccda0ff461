"""DeepSeek-R1-0528 Qwen3 8B, Qwen3 taught to think by DeepSeek-R1-0528."""

model = dict(path="deepseek-ai/DeepSeek-R1-0528-Qwen3-8B")
architecture = dict(_base_="qwen3_8b", max_position_embeddings=131072)
