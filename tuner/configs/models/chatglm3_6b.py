"""ChatGLM3 6B, Z.ai's chat model of 2023; remote code only."""

model = dict(path="THUDM/chatglm3-6b", remote_code=True)
