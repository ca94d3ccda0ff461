"""DeepSeek Coder 1.3B Instruct, DeepSeek's chat model for code."""

model = dict(path="deepseek-ai/deepseek-coder-1.3b-instruct")
architecture = "deepseek_coder_1_3b_base"
