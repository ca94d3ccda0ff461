"""DeepSeek Coder 6.7B Instruct, DeepSeek's chat model for code."""

model = dict(path="deepseek-ai/deepseek-coder-6.7b-instruct")
architecture = "deepseek_coder_6_7b_base"
