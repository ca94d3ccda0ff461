"""Qwen 14B Chat, Alibaba's first chat model of its size; remote code only."""

model = dict(path="Qwen/Qwen-14B-Chat", chat_template="chatml", remote_code=True)
