"""Qwen 72B, Alibaba's first base model of its size; remote code only."""

model = dict(path="Qwen/Qwen-72B", chat_template="chatml", remote_code=True)
