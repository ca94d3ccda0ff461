"""InternLM2-Chat 7B, Shanghai AI Laboratory's chat model."""

model = dict(path="internlm/internlm2-chat-7b", chat_template="internlm2")
architecture = "internlm2_7b"
