"""Qwen 7B, Alibaba's first base model of its size; remote code only."""

model = dict(path="Qwen/Qwen-7B", chat_template="chatml", remote_code=True)
