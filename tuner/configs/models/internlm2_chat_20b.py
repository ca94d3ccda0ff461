"""InternLM2-Chat 20B, Shanghai AI Laboratory's larger chat model."""

model = dict(path="internlm/internlm2-chat-20b", chat_template="internlm2")
architecture = "internlm2_20b"
