"""DeepSeek MoE 16B Chat, DeepSeek's first chat model with experts; remote code only."""

model = dict(path="deepseek-ai/deepseek-moe-16b-chat", remote_code=True)
