"""InternLM2.5-Chat 1.8B, Shanghai AI Laboratory's small chat model of the second generation's update."""

model = dict(path="internlm/internlm2_5-1_8b-chat", chat_template="internlm2")
architecture = "internlm2_1_8b"
