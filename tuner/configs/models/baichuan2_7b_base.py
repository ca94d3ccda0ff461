"""Baichuan 2 7B, Baichuan's base model; remote code only."""

model = dict(path="baichuan-inc/Baichuan2-7B-Base", chat_template="xtuner_default", remote_code=True)
