"""DeepSeek Coder 6.7B, DeepSeek's base model for code."""

model = dict(path="deepseek-ai/deepseek-coder-6.7b-base", chat_template="deepseek_coder")
architecture = dict(_base_="llama_7b", vocab_size=32256, max_position_embeddings=16384)
