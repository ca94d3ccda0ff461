"""DeepSeek Coder V2 Lite 16B Instruct, DeepSeek's chat model for code with 64 experts."""

model = dict(path="deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct")
architecture = "deepseek_v2_lite"
