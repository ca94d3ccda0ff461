"""DeepSeek Math 7B Instruct, DeepSeek's chat model for mathematics."""

model = dict(path="deepseek-ai/deepseek-math-7b-instruct")
architecture = "deepseek_llm_7b_base"
