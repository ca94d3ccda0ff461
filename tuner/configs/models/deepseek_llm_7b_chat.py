"""DeepSeek LLM 7B Chat, DeepSeek's first chat model."""

model = dict(path="deepseek-ai/deepseek-llm-7b-chat")
architecture = "deepseek_llm_7b_base"
