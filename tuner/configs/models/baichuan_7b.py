"""Baichuan 7B, Baichuan's first base model; remote code only."""

model = dict(path="baichuan-inc/Baichuan-7B", chat_template="xtuner_default", remote_code=True)
