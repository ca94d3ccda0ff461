"""DeepSeek LLM 67B, DeepSeek's first large base model."""

model = dict(path="deepseek-ai/deepseek-llm-67b-base", chat_template="deepseek")
architecture = dict(_base_="llama2_70b", num_hidden_layers=95, intermediate_size=22016, vocab_size=102400)
