"""ChatGLM3 6B Base, Z.ai's base model of 2023; remote code only."""

model = dict(path="THUDM/chatglm3-6b-base", chat_template="xtuner_default", remote_code=True)
