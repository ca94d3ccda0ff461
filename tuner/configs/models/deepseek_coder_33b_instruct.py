"""DeepSeek Coder 33B Instruct, DeepSeek's chat model for code."""

model = dict(path="deepseek-ai/deepseek-coder-33b-instruct")
architecture = "deepseek_coder_33b_base"
