"""InternLM2-Chat 1.8B, Shanghai AI Laboratory's small chat model."""

model = dict(path="internlm/internlm2-chat-1_8b", chat_template="internlm2")
architecture = "internlm2_1_8b"
