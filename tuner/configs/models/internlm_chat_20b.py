"""InternLM-Chat 20B, Shanghai AI Laboratory's first larger chat model."""

model = dict(path="internlm/internlm-chat-20b", chat_template="internlm")
architecture = "internlm_20b"
