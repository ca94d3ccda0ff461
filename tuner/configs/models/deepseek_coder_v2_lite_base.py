"""DeepSeek Coder V2 Lite 16B, DeepSeek's base model for code with 64 experts."""

model = dict(path="deepseek-ai/DeepSeek-Coder-V2-Lite-Base", chat_template="deepseek")
architecture = "deepseek_v2_lite"
