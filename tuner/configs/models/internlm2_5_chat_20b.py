"""InternLM2.5-Chat 20B, Shanghai AI Laboratory's larger chat model of the second generation's update."""

model = dict(path="internlm/internlm2_5-20b-chat", chat_template="internlm2")
architecture = "internlm2_20b"
