"""Qwen 1.8B, Alibaba's first base model of its size; remote code only."""

model = dict(path="Qwen/Qwen-1_8B", chat_template="chatml", remote_code=True)
