"""DeepSeek MoE 16B, DeepSeek's first base model with experts; remote code only."""

model = dict(path="deepseek-ai/deepseek-moe-16b-base", chat_template="deepseek", remote_code=True)
