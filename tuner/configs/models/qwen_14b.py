"""Qwen 14B, Alibaba's first base model of its size; remote code only."""

model = dict(path="Qwen/Qwen-14B", chat_template="chatml", remote_code=True)
