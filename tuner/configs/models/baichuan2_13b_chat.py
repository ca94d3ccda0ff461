"""Baichuan 2 13B Chat, Baichuan's larger chat model; remote code only."""

model = dict(path="baichuan-inc/Baichuan2-13B-Chat", remote_code=True)
