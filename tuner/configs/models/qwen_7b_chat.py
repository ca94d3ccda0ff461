"""Qwen 7B Chat, Alibaba's first chat model of its size; remote code only."""

model = dict(path="Qwen/Qwen-7B-Chat", chat_template="chatml", remote_code=True)
