"""DeepSeek LLM 7B, DeepSeek's first base model."""

model = dict(path="deepseek-ai/deepseek-llm-7b-base", chat_template="deepseek")
architecture = dict(_base_="llama_7b", num_hidden_layers=30, vocab_size=102400, max_position_embeddings=4096)
