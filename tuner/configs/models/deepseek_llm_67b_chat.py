"""DeepSeek LLM 67B Chat, DeepSeek's first large chat model."""

model = dict(path="deepseek-ai/deepseek-llm-67b-chat")
architecture = "deepseek_llm_67b_base"
