"""Baichuan 2 13B, Baichuan's larger base model; remote code only."""

model = dict(path="baichuan-inc/Baichuan2-13B-Base", chat_template="xtuner_default", remote_code=True)
