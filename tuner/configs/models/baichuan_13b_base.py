"""Baichuan 13B, Baichuan's first larger base model; remote code only."""

model = dict(path="baichuan-inc/Baichuan-13B-Base", chat_template="xtuner_default", remote_code=True)
