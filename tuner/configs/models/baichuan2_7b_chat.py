"""Baichuan 2 7B Chat, Baichuan's chat model; remote code only."""

model = dict(path="baichuan-inc/Baichuan2-7B-Chat", remote_code=True)
