"""InternLM2.5 1.8B, Shanghai AI Laboratory's small base model of the second generation's update."""

model = dict(path="internlm/internlm2_5-1_8b", chat_template="internlm2")
architecture = "internlm2_1_8b"
