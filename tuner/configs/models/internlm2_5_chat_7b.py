"""InternLM2.5-Chat 7B, Shanghai AI Laboratory's chat model of the second generation's update."""

model = dict(path="internlm/internlm2_5-7b-chat", chat_template="internlm2")
architecture = "internlm2_7b"
