"""InternLM-Chat 7B, Shanghai AI Laboratory's first chat model."""

model = dict(path="internlm/internlm-chat-7b", chat_template="internlm")
architecture = "internlm_7b"
