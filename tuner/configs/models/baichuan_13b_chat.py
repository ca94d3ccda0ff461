"""Baichuan 13B Chat, Baichuan's first chat model; remote code only."""

model = dict(path="baichuan-inc/Baichuan-13B-Chat", remote_code=True)
